"""``solrl prompts import``: converts prompt sets to the two files that a run reads, ``train.jsonl`` and
``heldout.jsonl``.

source (file, folder of a train and a test file, image folder, data set id)
    ──► strip ──► remove repetitions ──► remove held-out prompts from train ──► files, and counts of all lines
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
"""Value of `heldout` to hold out all prompts, for a benchmark such as DrawBench."""
SPLIT = b"solrl.heldout"
"""Personalisation of the hash that chooses the prompts to hold out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Distinct training and held-out prompts in the order of their source, with counts of its lines."""

    entries: tuple[tuple[Entry, ...], tuple[Entry, ...]]
    """Training prompts, held-out prompts."""
    lines: tuple[int, int]
    """Number of prompts read, with repetitions: training, held out. Prompts that were split off count as training."""
    repeated: int
    """Lines removed because the prompt occurs earlier in the same split."""
    removed: int
    """Distinct training prompts removed because they are held out."""
    empty: int = 0
    """Lines and rows without a prompt."""
    columns: tuple[str, ...] = ()
    """Columns that the prompts come from: one, unless the splits differ; empty if the source has no columns."""

    @property
    def train(self) -> tuple[str, ...]:
        """Texts of the training prompts."""
        return tuple(entry.text for entry in self.entries[0])

    @property
    def heldout(self) -> tuple[str, ...]:
        """Texts of the held-out prompts."""
        return tuple(entry.text for entry in self.entries[1])


def import_prompts(source: str, *, heldout: int | str | None = None, column: str = "") -> Imported:
    """Read a prompt set.

    Args:
        source: a file, a folder with a train and a test (or heldout) file, an image folder, or the id of a data set
            (``owner/name``). In an image folder, each image is the reference of a prompt. The prompts are in
            ``metadata.jsonl`` or ``metadata.csv`` (key ``file_name``), or in a text file of the same name next to each
            image.
        heldout: `ALL`, a file of held-out prompts, or the number of prompts to split off. The choice depends only on
            the prompt ids, not on their order, so that it changes little when the set grows.
        column: column with the prompts in tables and objects; default: the first of `sources.COLUMNS` that exists.

    Raises UserError if the source is missing, has an unknown format, no prompts, or fewer than `heldout`; or if a
    reference image cannot be used (`references.opened`).
    """
    read = sources.parts(source, column)
    if isinstance(heldout, str) and heldout != ALL:
        read = read[0], _file(heldout, column)
    if column and column not in (lines.column for lines in read):
        raise UserError(f"--column is {column!r}, but {source} has no columns; leave it out.")
    first, second = read[0].entries, read[1].entries
    if heldout == ALL:
        first, second = [], [*first, *second]
    count = len(first) + len(second)
    first, second = [entry for entry in first if entry.text], [entry for entry in second if entry.text]
    empty = count - len(first) - len(second)
    train, held_out = _distinct(first), _distinct(second)
    repeated = len(first) - len(train) + len(second) - len(held_out)
    if isinstance(heldout, int):
        if second:
            raise UserError(f"--heldout is {heldout}, but {source} already has held-out prompts; leave it out.")
        train, held_out = _split(train, heldout, source)
    kept = {key: entry for key, entry in train.items() if key not in held_out}
    if not kept and not held_out:
        raise UserError(f"{source} has no prompts.")
    return Imported(
        entries=(tuple(kept.values()), tuple(held_out.values())),
        lines=(len(first), len(second)),
        repeated=repeated,
        removed=len(train) - len(kept),
        empty=empty,
        columns=tuple(dict.fromkeys(lines.column for lines in read if lines.column)),
    )


def _file(heldout: str, column: str) -> Lines:
    """Read the file given with ``--heldout``."""
    if not (path := located(heldout, "--heldout")).exists() or path.is_dir():
        raise UserError(f"--heldout is {heldout!r}; it must be a number of prompts, a file with prompts, or {ALL}.")
    return sources.read(path, column)


def _split(train: dict[str, Entry], heldout: int, source: str) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Split off `heldout` entries; returns the remaining entries and those split off."""
    if not 0 < heldout < len(train):
        fix = f"it must be 1 to {len(train) - 1}" if len(train) > 1 else "leave it out"
        raise UserError(f"--heldout is {heldout}, but {source} has {counted(len(train), 'training prompt')}; {fix}.")
    # Sorted by a hash of each prompt, so that the choice of a prompt hardly depends on the others.
    chosen = set(sorted(train, key=lambda key: blake2b(key.encode(), digest_size=8, person=SPLIT).digest())[:heldout])
    stay = {key: entry for key, entry in train.items() if key not in chosen}
    return stay, {key: entry for key, entry in train.items() if key in chosen}


def write_prompts(imported: Imported, folder: Path, *, force: bool = False) -> list[Path]:
    """Write ``train.jsonl`` and ``heldout.jsonl`` (each only if it has prompts); returns the files.

    Raises UserError if a file exists with other prompts and `force` is not set. Nothing is written then.
    """
    contents = {
        folder / f"{split}.jsonl": "".join(_line(entry, folder) for entry in entries).encode()
        for split, entries in zip(("train", "heldout"), imported.entries, strict=True)
        if entries
    }
    try:
        for path, content in contents.items():
            if not force and path.exists() and path.read_bytes() != content:
                raise UserError(
                    f"{path} already exists with other prompts; choose another folder with --out, or overwrite it with "
                    "--force."
                )
        for path, content in contents.items():
            replace_file(path, content)
    except OSError as error:
        raise UserError(
            f"--out is {str(folder)!r}, which cannot be written: {error.filename}: {error.strerror}."
        ) from error
    return list(contents)


def _line(entry: Entry, folder: Path) -> str:
    """The line of an entry in a file of `folder`. Image paths are relative to the folder."""
    fields: dict[str, Any] = {"id": entry.id, "text": entry.text}
    if entry.references:
        # Resolve the folders first: ".." after a symbolic link would leave the target of the link.
        files = [Path(reference.path) for reference in entry.references]
        fields["reference"] = [os.path.relpath(file.parent.resolve() / file.name, folder.resolve()) for file in files]
    return json.dumps(fields, ensure_ascii=False) + "\n"


def report(imported: Imported, files: Sequence[Path]) -> str:
    """Report for the terminal: counts of prompts read, removed and kept, and the files written."""
    read, held_out = imported.lines
    per_split = f"{read} to train on, {held_out} held out"
    whole = counted(read, "prompt")  # --heldout may have split off some of them
    lines = [f"read        {per_split if held_out else whole}"]
    if imported.columns:
        lines[0] += f", from column {' and '.join(imported.columns)}"
    dropped = f"dropped     {counted(imported.repeated, 'repetition')}, "
    dropped += f"{counted(imported.removed, 'training prompt')} held out as well"
    lines.append(dropped + (f", {counted(imported.empty, 'line')} without a prompt" if imported.empty else ""))
    lines.append(f"kept        {len(imported.train)} to train on, {len(imported.heldout)} held out")
    lines += [f"prompts.{path.stem}: {path}" for path in files]
    if not imported.heldout:
        lines.append("note: no held-out prompts, but a run needs some; split them off with --heldout N")
    return "\n".join(lines)


def _distinct(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Prompt id → first entry with this id, in order of appearance."""
    distinct: dict[str, Entry] = {}
    for entry in entries:
        distinct.setdefault(entry.id, entry)
    return distinct
