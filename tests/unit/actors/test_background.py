"""Work in another thread, and what it has the main thread do."""

from __future__ import annotations

import threading

import pytest

from actors.cluster.background import Background
from solrl_ray.errors import RunError


def finish(aside: Background[object]) -> None:
    for _ in range(100):
        if aside.finished(seconds=1.0):
            return
    raise AssertionError("the work never ended")


def test_work_is_done_in_another_thread_and_its_result_brought_back() -> None:
    aside = Background(threading.get_ident, seconds=10.0)
    finish(aside)
    assert aside.result() != threading.get_ident()


def test_an_error_of_the_work_is_raised_in_the_main_thread() -> None:
    def fail() -> None:
        raise RunError("rank 1 is lost")

    aside = Background(fail, seconds=10.0)
    finish(aside)
    with pytest.raises(RunError, match="rank 1 is lost"):
        aside.result()


def test_an_errand_is_done_by_the_main_thread_and_its_error_goes_back_to_who_asked() -> None:
    def refuse() -> None:
        raise RunError("there are no groups")

    def work() -> tuple[int, str]:
        who = aside.ask(threading.get_ident, what="bringing groups")
        try:
            aside.ask(refuse, what="bringing groups")
        except RunError as error:
            return who, str(error)
        return who, ""

    begin = threading.Event()
    aside = Background(lambda: begin.wait(10.0) and work(), seconds=10.0)
    begin.set()
    finish(aside)
    assert aside.result() == (threading.get_ident(), "there are no groups")


def test_work_that_does_not_end_is_named_while_the_rest_is_looked_after() -> None:
    forever, looked = threading.Event(), []
    aside = Background(forever.wait, seconds=10.0, deadline=0.1, what="the checkpoint after 3 updates")
    with pytest.raises(RunError, match=r"^the checkpoint after 3 updates passed its deadline of 0\.1 s$"):
        aside.await_end(lambda seconds: not forever.wait(looked.append(seconds) or seconds))
    assert len(looked) > 1
    forever.set()


def test_a_main_thread_that_does_not_come_to_an_errand_is_named() -> None:
    begin = threading.Event()
    aside = Background(lambda: begin.wait(10.0) and aside.ask(lambda: 0, what="bringing groups"), seconds=0.05)
    asking = next(thread for thread in threading.enumerate() if thread.name == "aside")
    begin.set()
    asking.join(10.0)
    with pytest.raises(RunError, match=r"bringing groups: the controller did not come to it within 0\.05 s"):
        aside.result()
