"""What players note of what they do, and who is in which state by it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Note:
    at: float
    """Seconds by this machine's monotonic clock, which all its processes share."""
    who: str
    """Name of the actor: ``explorer-0.1``."""
    pid: int
    node: str
    doing: str

    @property
    def slot(self) -> str:
        """Whose place it has taken: ``explorer-0``."""
        return self.who.partition(".")[0]


class Reader:
    """Follows a file of notes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.notes: list[Note] = []
        self._last: dict[int, Note] = {}

    def read(self) -> None:
        """Take in what was noted since the last time."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            note = Note(**json.loads(line))
            self.notes.append(note)
            self._last[note.pid] = note

    def living(self) -> list[Note]:
        """The last note of each process that lives."""
        self.read()
        self._last = {pid: note for pid, note in self._last.items() if alive(pid)}
        return list(self._last.values())


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
