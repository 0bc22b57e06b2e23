"""What a process says that it does."""

from __future__ import annotations

from solrl_ray.common.progress_note import now, progress_note


def test_the_innermost_of_what_is_being_done_is_told_and_nothing_after_it() -> None:
    assert now() == ""
    with progress_note("loading the reward"):
        with progress_note("loading CLIPModel"):
            assert now() == "loading CLIPModel"
        assert now() == "loading the reward"
    assert now() == ""
