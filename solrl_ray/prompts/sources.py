"""Where imported prompts come from, and in which columns: text files, tables, folders, and data sets of the hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from solrl_ray.common.files import MOST_BYTES, decoded, located, read_regular, utf8_text
from solrl_ray.errors import UserError
from solrl_ray.prompts import references, tables
from solrl_ray.prompts.prompt_set import checked_text, prompt_id
from solrl_ray.prompts.tables import Row
from solrl_ray.records import Reference

COLUMNS = ("text", "prompt", "prompts", "caption")
"""Usual names of the prompt column, in any case."""
SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""In any case."""
HUB = "hf://datasets/"
"""May stand before the id of a data set, for one that would be taken for a path."""
HELDOUT_STEMS = ("test", "heldout")
PICTURES = (".png", ".jpg", ".jpeg", ".webp")
"""In any case."""
REFERENCE, FILE_NAME = "reference", "file_name"
"""Keys of a prompt's reference pictures; the second in ``metadata``, as in folders of pictures on the hub."""
_HELP = f"give a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file, a folder with a train and a test file, or an id"


class Entry(NamedTuple):
    text: str
    references: tuple[Reference, ...] = ()

    @property
    def id(self) -> str:
        return prompt_id(self.text, self.references)


@dataclass(frozen=True, slots=True)
class Lines:
    """The prompts of a part of the source, with repetitions; an empty text for each line without one."""

    entries: list[Entry]
    column: str = ""
    """Their column, if there are columns."""


def parts(source: str, column: str) -> tuple[Lines, Lines]:
    """The source's training and held-out lines; a single file is all for training."""
    path = located(source, "SOURCE")
    if path.is_dir():
        train, apart = _part(path, ("train",), column), _part(path, HELDOUT_STEMS, column)
        if train is None and apart is None:
            return _pictures(path, column), Lines([])
        return train or Lines([]), apart or Lines([])
    if path.exists():
        return read(path, column), Lines([])
    name = source.removeprefix(HUB)
    # The hub's names may have dots; a path has a suffix, or begins with a folder that is there.
    is_path = re.search(r"^[./~]|\.[A-Za-z]\w*$", name) or Path(name).parent.is_dir()
    if name.count("/") == 1 and all(name.split("/")) and (name != source or not is_path):
        return _of_hub(source, name, column)
    raise UserError(f"There is no {source}; {_HELP} of a data set of the hub, such as {HUB}owner/name.")


def _part(folder: Path, stems: Sequence[str], column: str) -> Lines | None:
    """The lines of a part: in a file of such a name, or in a folder of pictures, unless a table beside it lists them.
    None if there is neither.
    """
    if file := _file(folder, stems):
        return read(file, column)
    inside = [] if _file(folder, ("metadata",)) else [folder / stem for stem in stems if (folder / stem).is_dir()]
    return _pictures(inside[0], column) if inside else None


def _of_hub(source: str, name: str, column: str) -> tuple[Lines, Lines]:
    """As `parts`, of a data set; its only split is for training."""
    splits = _dataset(source, name)
    rows = {split: _column(tables.numbered(table, f"{source}, {split}"), column) for split, table in splits.items()}
    train = rows.get("train", next(iter(rows.values())) if len(rows) == 1 else Lines([]))
    return train, next((rows[stem] for stem in HELDOUT_STEMS if stem in rows), Lines([]))


def _pictures(folder: Path, column: str) -> Lines:
    """The prompts of a folder of pictures. Raises UserError: it has none, or one without a text."""
    if listed := _file(folder, ("metadata",)):
        return read(listed, column)
    found = [path for path in _visible(folder) if path.suffix.lower() in PICTURES]
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
    files = {path.name.lower(): path for path in _visible(folder) if path.is_file()}
    return next((files[f"{stem}{suffix}"] for stem in stems for suffix in SUFFIXES if f"{stem}{suffix}" in files), None)


def _visible(folder: Path) -> list[Path]:
    """Without hidden files, such as those that macOS writes beside others, ``._cat.png``."""
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]


def read(path: Path, column: str) -> Lines:
    """The prompts of one file, stripped. A pipe has JSONL if it begins with ``{``, else text."""
    suffix = path.suffix.lower()
    is_pipe = suffix not in SUFFIXES and (path.is_fifo() or path.is_relative_to("/dev"))
    if suffix not in SUFFIXES and not is_pipe:
        raise UserError(f"{path} is of no known kind; {_HELP} of a data set.")
    if suffix == ".parquet":
        return _column(tables.numbered(tables.of_parquet(path), str(path)), column)
    try:
        text = decoded(_of_pipe(path) if is_pipe else read_regular(path), str(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if is_pipe:
        suffix = ".jsonl" if text.lstrip().startswith("{") else ".txt"
    lines = [(f"{path}, line {number}", line) for number, line in enumerate(text.removesuffix("\n").split("\n"), 1)]
    match suffix:
        case ".txt":
            return Lines([Entry(line.strip()) for _, line in lines])
        case ".jsonl":
            rows = tables.of_jsonl(lines)
        case ".json":
            rows = tables.of_json(path)
        case ".tsv":
            rows = tables.of_tsv(lines, path)
        case _:
            rows = tables.of_csv(text, path)
    return _column(rows, column, path.parent, FILE_NAME if path.stem.lower() == "metadata" else REFERENCE)


def _of_pipe(path: Path) -> bytes:
    with path.open("rb") as pipe:
        content = pipe.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UserError(f"{path} has more than {MOST_BYTES:,} bytes; write it to a file, and import parts of it.")
    return content


def _column(rows: Iterable[Row], column: str, folder: Path | None = None, key: str = REFERENCE) -> Lines:
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
    return Lines([Entry(text, own) for text, own in zip(texts, seen, strict=True)], wanted)


def _dataset(source: str, name: str) -> Any:
    """What the package 'datasets' loads."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{source} is no file here; as a data set of the hub it is read with the package 'datasets', which is not "
            "installed: pip install datasets, or export the prompts to a text, CSV or JSONL file."
        ) from None
    try:
        return datasets.load_dataset(name)
    except Exception as error:  # of the hub, the network, the file's format
        raise UserError(f"{source} cannot be loaded: {type(error).__name__}: {error}") from error
