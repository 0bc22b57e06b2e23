"""Converts prompt sets to the two files that a run reads: ``train.jsonl`` and ``heldout.jsonl``.

text, CSV, TSV, JSON, JSONL, parquet, a folder of two of them, a folder of pictures, a data set's id
    ──► strip ──► one of each id ──► train without what is held out ──► files, and counts of all lines
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from solrl_ray.common.files import located, read_json, replace_file
from solrl_ray.errors import UserError
from solrl_ray.prompts import references
from solrl_ray.prompts.prompt_set import checked_text, json_object, prompt_id, utf8_text
from solrl_ray.records import Reference

ALL = "all"
"""For `heldout`: hold all prompts out, as of a benchmark such as DrawBench."""
COLUMNS = ("text", "prompt", "prompts", "caption")
"""Usual names of the prompt column, in any case."""
SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""In any case."""
HUB = "hf://datasets/"
"""May stand before the id of a data set, for one that would be taken for a path."""
SPLIT = b"solrl.heldout"
HELDOUT_STEMS = ("test", "heldout")
PICTURES = (".png", ".jpg", ".jpeg", ".webp")
"""In any case."""
REFERENCE, FILE_NAME = "reference", "file_name"
"""Keys of a prompt's reference pictures; the second in ``metadata``, as in folders of pictures on the hub."""
_HELP = f"give a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file, a folder with a train and a test file, or an id"


class Entry(NamedTuple):
    """A prompt of a source."""

    text: str
    references: tuple[Reference, ...] = ()

    @property
    def id(self) -> str:
        return prompt_id(self.text, self.references)


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
        column: of tables and objects; default: the first of `COLUMNS` that exists.

    Raises UserError: the source is missing, of an unknown kind, without a prompt, or has fewer than `heldout`; or a
    reference picture cannot be taken (`references.opened`).
    """
    read = _parts(source, column)
    first, second = read[0].entries, read[1].entries
    if heldout == ALL:
        first, second = [], [*first, *second]
    elif isinstance(heldout, str):
        if not located(heldout, "--heldout").is_file():
            raise UserError(f"--heldout is {heldout!r}; it must be a number of prompts, a file of them, or {ALL}.")
        read = (read[0], _read(located(heldout, "--heldout"), column))
        second = read[1].entries
    count = len(first) + len(second)
    first, second = [entry for entry in first if entry.text], [entry for entry in second if entry.text]
    empty = count - len(first) - len(second)
    train, apart = _distinct(first), _distinct(second)
    repeated = len(first) - len(train) + len(second) - len(apart)
    if isinstance(heldout, int):
        if second:
            raise UserError(f"--heldout is {heldout}, but {source} has held-out prompts of its own; leave it out.")
        if not 0 < heldout < len(train):
            most = f"1 to {len(train) - 1}, for" if len(train) > 1 else "left out, for"
            raise UserError(f"--heldout is {heldout}; it must be {most} {source} has {len(train)} to train on.")
        # By a separate hash, so that the choice of one does not depend on the others.
        chosen = set(
            sorted(train, key=lambda key: blake2b(key.encode(), digest_size=8, person=SPLIT).digest())[:heldout]
        )
        apart = {key: entry for key, entry in train.items() if key in chosen}
        train = {key: entry for key, entry in train.items() if key not in chosen}
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
    whole = f"{read} prompt{'' if read == 1 else 's'}"  # of which --heldout may have chosen some
    lines = [f"read        {parts if apart else whole}"]
    if imported.columns:
        lines[0] += f", from column {' and '.join(imported.columns)}"
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

    entries: list[Entry]
    column: str = ""
    """Their column, if there are columns."""


def _parts(source: str, column: str) -> tuple[_Lines, _Lines]:
    """The source's training and held-out lines; a single file is all for training."""
    path = located(source, "SOURCE")
    if path.is_file():
        return _read(path, column), _Lines([])
    if path.is_dir():
        train, apart = _file(path, ("train",)), _file(path, HELDOUT_STEMS)
        if train is None and apart is None:
            return _pictures(path, column), _Lines([])
        return (_read(train, column) if train else _Lines([])), (_read(apart, column) if apart else _Lines([]))
    name = source.removeprefix(HUB)
    # The hub's names may have dots; a path has a suffix, or begins with a folder that is there.
    is_path = re.search(r"^[./~]|\.[A-Za-z]\w*$", name) or Path(name).parent.is_dir()
    if name.count("/") == 1 and all(name.split("/")) and (name != source or not is_path):
        splits = _dataset(source, name)
        rows = {split: _column(_rows(table, f"{source}, {split}"), column) for split, table in splits.items()}
        train_rows = rows.get("train", next(iter(rows.values())) if len(rows) == 1 else _Lines([]))
        return train_rows, next((rows[stem] for stem in HELDOUT_STEMS if stem in rows), _Lines([]))
    raise UserError(f"There is no {source}; {_HELP} of a data set of the hub, such as {HUB}owner/name.")


def _pictures(folder: Path, column: str) -> _Lines:
    """The prompts of a folder of pictures. Raises UserError: it has none, or one without a text."""
    if listed := _file(folder, ("metadata",)):
        return _read(listed, column)
    found = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in PICTURES]
    if not found:
        raise UserError(
            f"{folder} has neither a train nor a test file ({', '.join(SUFFIXES)}), "
            f"nor pictures ({', '.join(PICTURES)})."
        )
    if alone := [path.name for path in found if not path.with_suffix(".txt").is_file()]:
        raise UserError(
            f"{folder} has the picture {alone[0]} without a prompt; write its prompt to {Path(alone[0]).stem}.txt, or "
            "all prompts to metadata.jsonl."
        )
    texts = (utf8_text(path.with_suffix(".txt"), str(path.with_suffix(".txt"))).strip() for path in found)
    rows = ((str(path), {"text": text, "reference": path.name}) for path, text in zip(found, texts, strict=True))
    return _column(rows, "text", folder)


def _file(folder: Path, stems: Sequence[str]) -> Path | None:
    files = {path.name.lower(): path for path in sorted(folder.iterdir()) if path.is_file()}
    return next((files[f"{stem}{suffix}"] for stem in stems for suffix in SUFFIXES if f"{stem}{suffix}" in files), None)


def _read(path: Path, column: str) -> _Lines:
    """The prompts of one file, stripped."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path} is of no known kind; {_HELP} of a data set.")
    if suffix == ".parquet":
        table = _dataset(str(path), "parquet", data_files=str(path), split="train")
        return _column(_rows(table, str(path)), column)
    try:
        text = utf8_text(path, str(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    lines = [(f"{path}, line {number}", line) for number, line in enumerate(text.removesuffix("\n").split("\n"), 1)]
    match suffix:
        case ".txt":
            return _Lines([Entry(line.strip()) for _, line in lines])
        case ".jsonl":
            rows: Iterable[Row] = ((place, json_object(line, place)) for place, line in lines if line.strip())
        case ".json":
            rows = _entries(path)
        case ".tsv":
            rows = _named(_tabbed(lines), str(path), "\t")
        case _:
            rows = _named(_commas(text, path), str(path), ",")
    return _column(rows, column, path.parent, FILE_NAME if path.stem.lower() == "metadata" else REFERENCE)


Row = tuple[str, dict[str, Any]]
"""Where it stands, for messages, and its values by column."""


def _rows(table: Iterable[dict[str, Any]], source: str) -> Iterator[Row]:
    return ((f"{source}, row {number}", row) for number, row in enumerate(table, 1))


def _entries(path: Path) -> Iterator[Row]:
    """Of a JSON file: a list of objects, or of prompts, whose column is then ``text``."""
    entries = read_json(path)
    if not isinstance(entries, list):
        raise UserError(f"{path} is no list; right is a list of prompts, or of objects with a prompt each.")
    objects = (entry if isinstance(entry, dict) else {"text": entry} for entry in entries)
    return ((f"{path}, entry {number}", entry) for number, entry in enumerate(objects, 1))


def _commas(text: str, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Where each row of a CSV file begins, and its fields; empty lines are left out."""
    # Strict: else an unclosed quote would join all following lines into one prompt.
    table = csv.reader(io.StringIO(text, newline=""), strict=True)
    begin = 1
    try:
        for fields in table:
            if fields:
                yield f"{path}, line {begin}", fields
            begin = table.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}, line {begin}: {error}; a field with a quote must be in quotes, and its own quotes doubled."
        ) from error


def _tabbed(lines: Sequence[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Rows as by `_commas`. The format has no quotes; only if all of the file are as CSV has them, they are dropped."""
    rows = [(place, line.split("\t")) for place, line in lines if line.strip()]
    quoted = all(_QUOTED.fullmatch(field) for _, fields in rows for field in fields if '"' in field)
    return ((p, [f.strip()[1:-1].replace('""', '"') if quoted and '"' in f else f for f in fs]) for p, fs in rows)


_QUOTED = re.compile(r'\s*"([^"]|"")*"\s*')


def _named(rows: Iterator[tuple[str, list[str]]], source: str, separator: str) -> Iterator[Row]:
    """Rows by the names of the first one. Raises UserError: another number of fields than names."""
    _, names = next(rows, ("", list[str]()))
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{source} has two columns {twice[0]!r}; each needs a name of its own.")
    for place, fields in rows:
        if len(fields) != len(names):
            mend = "a prompt with a comma must be in double quotes" if separator == "," else "a prompt can have no tab"
            shown = repr(separator.join(fields))
            raise UserError(
                f"{place} has {len(fields)} fields, its header {len(names)} ({', '.join(names)}): {shown:.200}; {mend}."
            )
        yield place, dict(zip(names, fields, strict=True))


def _column(rows: Iterable[Row], column: str, folder: Path | None = None, key: str = REFERENCE) -> _Lines:
    """The prompts of rows. Paths of reference pictures, under `key`, count from `folder`; None: there are none."""
    wanted, texts, named, counts = "", list[str](), list[tuple[str, str]](), list[int]()
    for place, row in rows:
        if not wanted:
            lower = {name.strip().lower(): name for name in row}
            wanted = column or next((lower[known] for known in COLUMNS if known in lower), "")
            if not wanted or wanted not in row:
                asked = f"no column {column!r}" if column else f"none of the columns {', '.join(COLUMNS)}"
                raise UserError(f"{place} has {asked}; it has {', '.join(row)}: name one with --column.")
        if wanted not in row:
            raise UserError(f"{place} has no {wanted!r}, which the first one has; it has {', '.join(row)}.")
        texts.append(
            checked_text(row[wanted] if row[wanted] is not None else "", f"{place}, column {wanted!r}").strip()
        )
        own = references.paths(row[key], folder, place) if folder and row.get(key) else []
        named += [(path, place) for path in own]
        counts.append(len(own))
    found = iter(references.known(named, decode=True) if named else ())
    seen = [tuple(next(found) for _ in range(count)) for count in counts]
    return _Lines([Entry(text, own) for text, own in zip(texts, seen, strict=True)], wanted)


def _distinct(entries: Iterable[Entry]) -> dict[str, Entry]:
    """By prompt id, in order of first appearance."""
    found: dict[str, Entry] = {}
    for entry in entries:
        found.setdefault(entry.id, entry)
    return found


def _dataset(source: str, name: str, **options: Any) -> Any:
    """What the package 'datasets' loads."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{source} {'' if Path(source).is_file() else 'is no file here; as a data set of the hub it '}is read "
            "with the package 'datasets', which is not installed: pip install datasets, or export the prompts to a "
            "text, CSV or JSONL file."
        ) from None
    try:
        return datasets.load_dataset(name, **options)
    except Exception as error:  # of the hub, the network, the file's format
        raise UserError(f"{source} cannot be loaded: {type(error).__name__}: {error}") from error
