"""What a soak found: how long it took until all were whole again after somebody was killed, and what must not be."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.notes import Note

WHOLE = {
    "explorer": ("ready",),
    "regenerator": ("ready",),
    "learner": ("joined", "loaded"),
    "selector": ("open",),
    "text_encoder": ("idle",),
}
"""Role → what its players note when they can work (again)."""
EVERYBODY = ("driver", "controller")
"""Who ends the run, which is whole again when an explorer of the resumed one is at work."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    kind: str
    victim: Note
    """When, and who; of a node or a driver only when."""
    slots: tuple[str, ...]
    """Whose places are to be taken: ``explorer-0``."""


@dataclass(frozen=True, slots=True)
class End:
    """A run that ended by itself."""

    sentence: str
    since: float
    """When it was started."""


ENDS = {
    "the controller is gone": "controller",
    "encoding ": "text_encoder",
    "the start of encoder-": "text_encoder",
}
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


def recovery(disturbance: Disturbance, others: Sequence[Disturbance], notes: Sequence[Note]) -> float | None:
    """Seconds until the victims' places were taken; None if somebody else was killed meanwhile who delays that."""
    at = disturbance.victim.at
    ends = [_whole(slot, disturbance.victim, notes) for slot in disturbance.slots]
    if not ends or None in ends:
        return None
    end = max(e for e in ends if e is not None)
    for other in others:
        wide = other.kind == "node" or other.victim.who in EVERYBODY
        same = set(other.slots) & set(disturbance.slots)
        if other is not disturbance and at < other.victim.at < end and (wide or same):
            return None
    return end - at


def _whole(slot: str, victim: Note, notes: Sequence[Note]) -> float | None:
    """When a new process in that slot could work."""
    before = {note.pid for note in notes if note.at <= victim.at}
    new = (note for note in notes if note.at > victim.at and note.pid not in before)
    if slot in EVERYBODY:
        return next((note.at for note in new if note.who.startswith("explorer") and note.doing == "working"), None)
    role = slot.partition("-")[0]
    return next((note.at for note in new if note.slot == slot and note.doing in WHOLE[role]), None)


def summarized(done: Sequence[Disturbance], notes: Sequence[Note]) -> dict[str, Any]:
    """By kind: how often, how often a time of recovery is known, their median and maximum in seconds."""
    rows = {}
    for kind in sorted({disturbance.kind for disturbance in done}):
        mine = [disturbance for disturbance in done if disturbance.kind == kind]
        seconds = [s for d in mine if (s := recovery(d, done, notes)) is not None]
        rows[kind] = {
            "times": len(mine),
            "recovered": len(seconds),
            "median": round(statistics.median(seconds), 2) if seconds else None,
            "max": round(max(seconds), 2) if seconds else None,
        }
    return rows
