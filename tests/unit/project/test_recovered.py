"""What a soak found: times of recovery, from what players noted, and what must not be."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.notes import Note
from tests.chaos.recovered import Disturbance, End, problems, recovery, summarized, unexplained

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


def test_a_run_may_end_with_a_documented_sentence_if_who_it_names_was_killed_since_its_start() -> None:
    gone, encoding = (
        "the controller is gone: …; go on with: solrl train --resume …",
        "encoding 2 prompts failed: its worker is gone: …",
    )
    encoder, controller = (killed(who, at, who) for who, at in (("text_encoder", 5.0), ("controller", 25.0)))
    both = [encoder, controller]
    assert unexplained([End(encoding, 0.0), End(gone, 20.0)], both) == []
    assert unexplained([End(encoding, 6.0)], both) == [encoding]  # nobody was killed since
    assert unexplained([End(gone, 20.0), End(gone, 21.0)], both) == [gone]  # one death, two ends
    assert unexplained([End(encoding, 0.0)], [controller]) == [encoding]
    assert unexplained([End("update 3 has no answer", 0.0)], both) == ["update 3 has no answer"]


WELL = {
    "same_digests": True,
    "first_difference": None,
    "unexpected_ends": [],
    "differing_results": 0,
    "stopped_processes_left_behind": 0,
}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, []),
        ({"same_digests": False, "first_difference": 3}, ["differ from those of the undisturbed twin; first in 3"]),
        ({"unexpected_ends": ["no room"]}, ["ended unexpectedly: no room"]),
        ({"differing_results": 2}, ["2 results came a second time with other bytes"]),
        ({"stopped_processes_left_behind": 1}, ["1 stopped processes were left behind"]),
    ],
)
def test_a_soak_fails_by_each_thing_that_must_not_be(wrong: dict[str, Any], said: list[str]) -> None:
    found = problems(WELL | wrong)
    assert len(found) == len(said)
    assert all(one.endswith(words) for one, words in zip(found, said, strict=True))
