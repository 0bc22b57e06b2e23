"""A minute of a soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.notes import Note
from tests.chaos.soak import show, soak
from tests.chaos.verdict import Disturbance, End, problems, unexplained


@pytest.mark.usefixtures("forked_workers")
def test_whoever_is_killed_in_a_minute_a_run_ends_with_the_bytes_of_its_undisturbed_twin(
    forks: str, tmp_path: Path
) -> None:
    found = soak(60.0, seed=1, every=4.0, root=tmp_path, forks=forks, hurry=False)
    show(found)
    assert problems(found) == []
    assert found["disturbances"] >= 3


def test_a_run_may_end_with_a_documented_sentence_if_who_it_names_was_killed_since_its_start() -> None:
    gone, encoding = "the controller is gone: …; go on with: …", "encoding 2 prompts failed: its worker is gone: …"
    encoder, controller = (
        Disturbance("killed", Note(at, who, 0, "", "")) for who, at in (("text_encoder", 5.0), ("controller", 25.0))
    )
    both = [encoder, controller]
    assert unexplained([End(encoding, 0.0), End(gone, 20.0)], both) == []
    assert unexplained([End(encoding, 6.0)], both) == [encoding]  # nobody was killed since
    assert unexplained([End(gone, 20.0), End(gone, 21.0)], both) == [gone]  # one death, two ends
    assert unexplained([End("update 3 has no answer", 0.0)], both) == ["update 3 has no answer"]
