"""Converts prompt sets to the two files that a run reads: ``train.jsonl`` and ``heldout.jsonl``.

text, CSV, TSV, JSONL, parquet, a folder of two of them, a data set's id
    ──► strip ──► one of each id ──► train without what is held out ──► files, and counts of all lines
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from solrl_ray.common.files import replace_file
from solrl_ray.errors import UserError
from solrl_ray.prompts.prompt_set import json_object, prompt_id

PUBLISHED = {"pickscore": (25432, 2048), "drawbench": (0, 200)}
"""Known sets → lines to train on and lines held out, as published. DrawBench is for evaluation only."""
COLUMNS = ("text", "prompt", "prompts", "caption")
"""Usual names of the prompt column, in any case."""
SUFFIXES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
SPLIT = b"solrl.heldout"
HELDOUT_STEMS = ("test", "heldout")
_HELP = f"give a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file, a folder with a train and a test file, or an id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Two lists of distinct prompts, in the order of their source, with counts of its lines."""

    train: tuple[str, ...]
    heldout: tuple[str, ...]
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


def import_prompts(source: str, *, name: str = "", heldout: int | str | None = None, column: str = "") -> Imported:
    """Read a prompt set.

    Args:
        source: a file, a folder with a train and a test (or heldout) file, or the id of a data set (``owner/name``).
        name: a known set; ``drawbench`` is held out as a whole.
        heldout: a file of held-out prompts, or how many to split off. The choice depends only on their ids, not on
            their order, so that a growing set keeps nearly all of them.
        column: of tables and objects; default: the first of `COLUMNS` that exists.

    Raises UserError: the source is missing, of an unknown kind, without a prompt, or has fewer than `heldout`.
    """
    read = _parts(source, column)
    first, second = read[0].texts, read[1].texts
    if name == "drawbench":
        first, second = [], [*first, *second]
    if isinstance(heldout, str):
        if not Path(heldout).is_file():
            raise UserError(f"--heldout is {heldout!r}; it must be a number of prompts, or a file of them.")
        read = (read[0], _read(Path(heldout), column))
        second = read[1].texts
    empty = first.count("") + second.count("")
    first, second = [text for text in first if text], [text for text in second if text]
    train, apart = _distinct(first), _distinct(second)
    repeated = len(first) - len(train) + len(second) - len(apart)
    if isinstance(heldout, int):
        if second:
            raise UserError(f"--heldout is {heldout}, but {source} has held-out prompts of its own; leave it out.")
        if not 0 < heldout < len(train):
            raise UserError(f"--heldout is {heldout}; it must be 1 to {len(train) - 1}, for {source} has {len(train)}.")
        # By a separate hash, so that the choice of one does not depend on the others.
        chosen = set(
            sorted(train, key=lambda key: blake2b(key.encode(), digest_size=8, person=SPLIT).digest())[:heldout]
        )
        apart = {key: text for key, text in train.items() if key in chosen}
        train = {key: text for key, text in train.items() if key not in chosen}
    kept = {key: text for key, text in train.items() if key not in apart}
    if not kept and not apart:
        raise UserError(f"{source} holds no prompt.")
    return Imported(
        train=tuple(kept.values()),
        heldout=tuple(apart.values()),
        lines=(len(first), len(second)),
        repeated=repeated,
        removed=len(train) - len(kept),
        empty=empty,
        columns=tuple(dict.fromkeys(part.column for part in read if part.column)),
    )


def write_prompts(imported: Imported, folder: Path, *, force: bool = False) -> list[Path]:
    """Write ``train.jsonl`` and ``heldout.jsonl``, each if it has a prompt; returns the files.

    Raises UserError: a file exists with other prompts and `force` is not set. Nothing is written then.
    """
    contents = {
        folder / f"{part}.jsonl": "".join(
            json.dumps({"id": prompt_id(text), "text": text}, ensure_ascii=False) + "\n" for text in texts
        ).encode()
        for part, texts in (("train", imported.train), ("heldout", imported.heldout))
        if texts
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


def report(imported: Imported, name: str, files: Sequence[Path]) -> str:
    """What was read, dropped and written, expected beside actual."""
    read, apart = imported.lines
    parts = f"{read} to train on, {apart} held out"
    whole = f"{read} prompt{'' if read == 1 else 's'}"  # of which --heldout may have chosen some
    lines = [f"read        {parts if apart or name in PUBLISHED else whole}"]
    if imported.columns:
        lines[0] += f", from column {' and '.join(imported.columns)}"
    if name in PUBLISHED:
        lines[0] += " (published: {} and {})".format(*PUBLISHED[name])
    dropped = f"dropped     {imported.repeated} repetitions, {imported.removed} training prompts that are held out"
    lines.append(dropped + (f", {imported.empty} lines without a prompt" if imported.empty else ""))
    lines.append(f"kept        {len(imported.train)} to train on, {len(imported.heldout)} held out")
    lines += [f"prompts.{path.stem}: {path}" for path in files]
    if not imported.heldout:
        lines.append("note: no held-out prompts; a run needs some: --heldout N")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Lines:
    """The prompts of a part of the source, with repetitions; an empty text for each line without one."""

    texts: list[str]
    column: str = ""
    """Their column, if there are columns."""


def _parts(source: str, column: str) -> tuple[_Lines, _Lines]:
    """The source's training and held-out lines; a single file is all for training."""
    path = Path(source).expanduser()
    if path.is_file():
        return _read(path, column), _Lines([])
    if path.is_dir():
        train, apart = _file(path, ("train",)), _file(path, HELDOUT_STEMS)
        if train is None and apart is None:
            raise UserError(f"{path} has neither a train nor a test file ({', '.join(SUFFIXES)}).")
        return (_read(train, column) if train else _Lines([])), (_read(apart, column) if apart else _Lines([]))
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        splits = _datasets(source).load_dataset(source)
        rows = {split: _column(splits[split], splits[split].column_names, column, source) for split in splits}
        train_rows = rows.get("train", next(iter(rows.values())) if len(rows) == 1 else _Lines([]))
        return train_rows, next((rows[stem] for stem in HELDOUT_STEMS if stem in rows), _Lines([]))
    raise UserError(f"There is no {source}; {_HELP} of a data set.")


def _file(folder: Path, stems: Sequence[str]) -> Path | None:
    found = (folder / f"{stem}{suffix}" for stem in stems for suffix in SUFFIXES)
    return next((path for path in found if path.is_file()), None)


def _read(path: Path, column: str) -> _Lines:
    """The prompts of one file, stripped."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} is of no known kind; {_HELP} of a data set.")
    if path.suffix == ".parquet":
        table = _datasets(str(path)).load_dataset("parquet", data_files=str(path), split="train")
        return _column(table, table.column_names, column, str(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if path.suffix == ".txt":
        return _Lines([line.strip() for line in text.removesuffix("\n").split("\n")])
    if path.suffix == ".jsonl":
        rows = [json_object(line, f"{path}, line {n}") for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        return _column(rows, list(rows[0]) if rows else [], column, str(path))
    # Strict: else an unclosed quote would join all following lines into one prompt.
    delimiter = "\t" if path.suffix == ".tsv" else ","
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        return _column(table, table.fieldnames or [], column, str(path))
    except csv.Error as error:
        raise UserError(f"{path}, line {table.line_num + 1}: {error}; quotes must come in pairs.") from error


def _column(rows: Iterable[Mapping[str, Any]], names: Sequence[str], column: str, source: str) -> _Lines:
    if not names:
        return _Lines([])
    lower = {name.strip().lower(): name for name in names}
    wanted = [column] if column else [lower[known] for known in COLUMNS if known in lower]
    if not wanted or wanted[0] not in names:
        asked = f"no column {column!r}" if column else f"none of the columns {', '.join(COLUMNS)}"
        raise UserError(f"{source} has {asked}; it has {', '.join(names)}: name one with --column.")
    values = []
    for number, row in enumerate(rows, 1):
        if wanted[0] not in row:
            raise UserError(f"{source}: its prompt number {number} has no {wanted[0]!r}, which the first one has.")
        values.append(row[wanted[0]])
    if bad := [value for value in values if not isinstance(value, str) and value is not None]:
        raise UserError(f"column {wanted[0]!r} of {source} holds {bad[0]!r}; it must hold prompts as text.")
    return _Lines([(value or "").strip() for value in values], wanted[0])


def _distinct(texts: Iterable[str]) -> dict[str, str]:
    """Prompt id → text, in order of first appearance."""
    return {prompt_id(text): text for text in texts}


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{source} is read with the package 'datasets', which is not installed: pip install datasets, or export "
            "the prompts to a text, CSV or JSONL file."
        ) from None
    return datasets
