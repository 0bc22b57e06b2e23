"""Times of recovery, from what players noted."""

from __future__ import annotations

from tests.chaos.notes import Note
from tests.chaos.recovered import Disturbance, recovery, summarized

NOTES = [
    Note(1.0, "explorer-0", 10, "n", "working"),
    Note(1.0, "explorer-1", 11, "n", "ready"),
    Note(2.5, "explorer-1", 11, "n", "ready"),
    Note(4.0, "explorer-0.1", 12, "n", "started"),
    Note(5.0, "explorer-0.1", 12, "n", "ready"),
    Note(8.0, "explorer-1.1", 13, "n", "ready"),
    Note(21.0, "explorer-1.1", 13, "n", "working"),
    Note(30.0, "explorer-0", 14, "n", "working"),
]


def killed(kind: str, at: float, who: str, *slots: str) -> Disturbance:
    return Disturbance(kind, Note(at, who, 0, "n", ""), slots)


def test_a_place_is_taken_when_another_process_in_it_is_ready() -> None:
    explorer = killed("explorer", 2.0, "explorer-0", "explorer-0")
    assert recovery(explorer, [explorer], NOTES) == 3.0


def test_a_node_is_made_up_for_when_all_places_are_taken() -> None:
    node = killed("node", 2.6, "node", "explorer-0", "explorer-1")
    assert recovery(node, [node], NOTES) == 8.0 - 2.6


def test_a_run_that_ended_is_whole_again_when_a_new_explorer_works() -> None:
    driver = killed("driver", 20.0, "driver", "driver")
    assert recovery(driver, [driver], NOTES) == 10.0


def test_a_time_that_another_death_made_longer_does_not_count() -> None:
    explorer = killed("explorer", 2.0, "explorer-0", "explorer-0")
    same, other = (killed("explorer", 3.0, who, who) for who in ("explorer-0", "explorer-1"))
    driver = killed("driver", 4.5, "driver", "driver")
    assert recovery(explorer, [explorer, same], NOTES) is None
    assert recovery(explorer, [explorer, driver], NOTES) is None
    assert recovery(explorer, [explorer, other], NOTES) == 3.0
    assert summarized([explorer, same], NOTES) == {"explorer": {"times": 2, "recovered": 1, "median": 2.0, "max": 2.0}}


def test_a_place_that_nobody_took_has_no_time() -> None:
    learner = killed("learner", 2.0, "learner-0", "learner-0")
    assert recovery(learner, [learner], NOTES) is None
