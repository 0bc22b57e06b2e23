"""What a soak has done and found, and what must not be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.notes import Note


@dataclass(frozen=True, slots=True)
class Disturbance:
    kind: str
    victim: Note
    """When, and who; of a node or a driver only when."""


@dataclass(frozen=True, slots=True)
class End:
    """A run that ended by itself."""

    sentence: str
    since: float
    """When it was started."""


ENDS = {"the controller is gone": "controller", "encoding ": "text_encoder", "the start of encoder-": "text_encoder"}
"""How a run may end → for whose death: who is not replaced, see docs/reference/failures.md."""


def unexplained(ends: Sequence[End], done: Sequence[Disturbance]) -> list[str]:
    """Sentences of ends that are not documented, or for which nobody was killed; each death explains one end."""
    left, found = list(done), []
    for end in ends:
        whose = next((who for words, who in ENDS.items() if end.sentence.startswith(words)), None)
        death = next((d for d in left if d.victim.who == whose and d.victim.at >= end.since), None)
        if death is None:
            found.append(end.sentence)
        else:
            left.remove(death)
    return found


def problems(found: Mapping[str, Any]) -> list[str]:
    """What must not be in a soak's results, a sentence each."""
    said = [f"ended unexpectedly: {end}" for end in found["unexpected_ends"]]
    if not found["same_digests"]:
        said.append(f"the digests differ from those of the undisturbed twin; first in {found['first_difference']}")
    if found["differing_results"]:
        said.append(f"{found['differing_results']} results came a second time with other bytes")
    if found["stopped_processes_left_behind"]:
        said.append(f"{found['stopped_processes_left_behind']} stopped processes were left behind")
    return said
