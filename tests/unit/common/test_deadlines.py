"""Work in a thread of its own, and what becomes of whoever waits for it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from solrl_ray.common.deadlines import in_thread, in_time
from solrl_ray.errors import RunError, UserError


def test_work_is_done_in_a_thread_with_its_name_and_brings_its_result() -> None:
    def work() -> tuple[int, str]:
        return threading.get_ident(), threading.current_thread().name

    who, name = in_thread(work, "reading runs/demo").result(timeout=10.0)
    assert who != threading.get_ident()
    assert name == "reading runs/demo"
    assert in_time(lambda: 7, what="reading runs/demo", seconds=10.0) == 7


def test_an_error_of_the_work_is_raised_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise UserError("runs/demo has no config.yaml")

    done = in_thread(fail, "reading runs/demo")
    with pytest.raises(UserError, match=r"^runs/demo has no config\.yaml$"):
        done.result(timeout=10.0)
    with pytest.raises(UserError, match=r"^runs/demo has no config\.yaml$"):
        in_time(fail, what="reading runs/demo", seconds=10.0)


@pytest.mark.parametrize(
    ("silent", "said"),
    [
        ({}, r"^reading runs/demo passed its deadline of 0\.1 s: the disk does not answer$"),
        ({"silent": "Ray"}, r"^reading runs/demo passed its deadline of 0\.1 s: Ray does not answer$"),
    ],
)
def test_work_that_does_not_end_is_left_to_itself_and_named(silent: dict[str, str], said: str) -> None:
    forever = threading.Event()
    with pytest.raises(RunError, match=said):
        in_time(forever.wait, what="reading runs/demo", seconds=0.1, **silent)
    forever.set()


def test_nobody_can_take_back_work_that_has_begun() -> None:
    go = threading.Event()
    done = in_thread(lambda: go.wait(10.0), "a wait")
    assert not done.cancel()
    go.set()
    assert done.result(timeout=10.0)


def test_work_that_hangs_does_not_keep_a_process_from_ending() -> None:
    program = (
        "import threading\n"
        "from solrl_ray.common.deadlines import in_thread\n"
        "in_thread(threading.Event().wait, 'a disk that is gone')\n"
        "print('over')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600.0, check=True)
    assert ended.stdout == "over\n"
