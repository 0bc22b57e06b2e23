"""``solrl prompts import``: converts prompt sets to the two files that a run reads, ``train.jsonl`` and
``heldout.jsonl``.

text, CSV, TSV, JSON, JSONL, parquet, a folder of two of them, a folder of pictures, a data set's id
    ──► strip ──► one of each id ──► train without what is held out ──► files, and counts of all lines
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from solrl_ray.common.files import located, replace_file
from solrl_ray.config.problems import counted
from solrl_ray.errors import UserError
from solrl_ray.prompts import sources
from solrl_ray.prompts.sources import Entry, Lines

ALL = "all"
"""For `heldout`: hold all prompts out, as of a benchmark such as DrawBench."""
SPLIT = b"solrl.heldout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Two lists of distinct prompts, in the order of their source, with counts of its lines."""

    entries: tuple[tuple[Entry, ...], tuple[Entry, ...]]
    """For training, held out."""
    lines: tuple[int, int]
    """Prompts read, repetitions included: for training, held out. A part that was split off counts as training."""
    repeated: int
    """Lines dropped because the same part has the prompt earlier."""
    removed: int
    """Distinct training prompts dropped because they are held out."""
    empty: int = 0
    """Lines and rows without a prompt."""
    columns: tuple[str, ...] = ()
    """The prompts' columns in tables and objects; one, unless parts differ."""

    @property
    def train(self) -> tuple[str, ...]:
        """The texts."""
        return tuple(entry.text for entry in self.entries[0])

    @property
    def heldout(self) -> tuple[str, ...]:
        return tuple(entry.text for entry in self.entries[1])


def import_prompts(source: str, *, heldout: int | str | None = None, column: str = "") -> Imported:
    """Read a prompt set.

    Args:
        source: a file, a folder with a train and a test (or heldout) file, or the id of a data set (``owner/name``). A
            folder of pictures makes each one the reference of a prompt: with ``metadata.jsonl`` or ``metadata.csv``
            (key ``file_name``), or with a text file of the same name beside each picture.
        heldout: `ALL`, a file of held-out prompts, or how many to split off. The choice depends only on their ids, not
            on their order, so that a growing set keeps nearly all of them.
        column: of tables and objects; default: the first of `sources.COLUMNS` that exists.

    Raises UserError: the source is missing, of an unknown kind, without a prompt, or has fewer than `heldout`; or a
    reference picture cannot be taken (`references.opened`).
    """
    read = sources.parts(source, column)
    if isinstance(heldout, str) and heldout != ALL:
        read = read[0], _file(heldout, column)
    if column and column not in (part.column for part in read):
        raise UserError(f"--column is {column!r}, but no prompts of {source} are in columns; leave it out.")
    first, second = read[0].entries, read[1].entries
    if heldout == ALL:
        first, second = [], [*first, *second]
    count = len(first) + len(second)
    first, second = [entry for entry in first if entry.text], [entry for entry in second if entry.text]
    empty = count - len(first) - len(second)
    train, apart = _distinct(first), _distinct(second)
    repeated = len(first) - len(train) + len(second) - len(apart)
    if isinstance(heldout, int):
        if second:
            raise UserError(f"--heldout is {heldout}, but {source} has held-out prompts of its own; leave it out.")
        train, apart = _split(train, heldout, source)
    kept = {key: entry for key, entry in train.items() if key not in apart}
    if not kept and not apart:
        raise UserError(f"{source} holds no prompt.")
    return Imported(
        entries=(tuple(kept.values()), tuple(apart.values())),
        lines=(len(first), len(second)),
        repeated=repeated,
        removed=len(train) - len(kept),
        empty=empty,
        columns=tuple(dict.fromkeys(part.column for part in read if part.column)),
    )


def _file(heldout: str, column: str) -> Lines:
    """The lines of a file of held-out prompts."""
    if not (path := located(heldout, "--heldout")).exists() or path.is_dir():
        raise UserError(f"--heldout is {heldout!r}; it must be a number of prompts, a file of them, or {ALL}.")
    return sources.read(path, column)


def _split(train: dict[str, Entry], heldout: int, source: str) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """What stays for training, and `heldout` entries that are split off."""
    if not 0 < heldout < len(train):
        most = f"1 to {len(train) - 1}, for" if len(train) > 1 else "left out, for"
        raise UserError(f"--heldout is {heldout}; it must be {most} {source} has {len(train)} to train on.")
    # By a separate hash, so that the choice of one does not depend on the others.
    chosen = set(sorted(train, key=lambda key: blake2b(key.encode(), digest_size=8, person=SPLIT).digest())[:heldout])
    stay = {key: entry for key, entry in train.items() if key not in chosen}
    return stay, {key: entry for key, entry in train.items() if key in chosen}


def write_prompts(imported: Imported, folder: Path, *, force: bool = False) -> list[Path]:
    """Write ``train.jsonl`` and ``heldout.jsonl``, each if it has a prompt; returns the files.

    Raises UserError: a file exists with other prompts and `force` is not set. Nothing is written then.
    """
    contents = {
        folder / f"{part}.jsonl": "".join(_line(entry, folder) for entry in entries).encode()
        for part, entries in zip(("train", "heldout"), imported.entries, strict=True)
        if entries
    }
    try:
        for path, content in contents.items():
            if not force and path.exists() and path.read_bytes() != content:
                raise UserError(
                    f"{path} is there already with other prompts; choose another folder with --out, or overwrite it "
                    "with --force."
                )
        for path, content in contents.items():
            replace_file(path, content)
    except OSError as error:
        raise UserError(
            f"--out is {str(folder)!r}, which cannot be written: {error.filename}: {error.strerror}."
        ) from error
    return list(contents)


def _line(entry: Entry, folder: Path) -> str:
    """In a file of `folder`, from which the paths of pictures count."""
    fields: dict[str, Any] = {"id": entry.id, "text": entry.text}
    if entry.references:
        # Of real folders: ".." after a link would go up from where it leads.
        files = [Path(each.path) for each in entry.references]
        fields["reference"] = [os.path.relpath(file.parent.resolve() / file.name, folder.resolve()) for file in files]
    return json.dumps(fields, ensure_ascii=False) + "\n"


def report(imported: Imported, files: Sequence[Path]) -> str:
    """What was read, dropped and written."""
    read, apart = imported.lines
    parts = f"{read} to train on, {apart} held out"
    whole = counted(read, "prompt")  # of which --heldout may have chosen some
    lines = [f"read        {parts if apart else whole}"]
    if imported.columns:
        lines[0] += f", from column {' and '.join(imported.columns)}"
    dropped = f"dropped     {counted(imported.repeated, 'repetition')}, "
    dropped += f"{counted(imported.removed, 'training prompt')} held out as well"
    lines.append(dropped + (f", {counted(imported.empty, 'line')} without a prompt" if imported.empty else ""))
    lines.append(f"kept        {len(imported.train)} to train on, {len(imported.heldout)} held out")
    lines += [f"prompts.{path.stem}: {path}" for path in files]
    if not imported.heldout:
        lines.append("note: no held-out prompts; a run needs some: --heldout N")
    return "\n".join(lines)


def _distinct(entries: Iterable[Entry]) -> dict[str, Entry]:
    """By prompt id, in order of first appearance."""
    found: dict[str, Entry] = {}
    for entry in entries:
        found.setdefault(entry.id, entry)
    return found
