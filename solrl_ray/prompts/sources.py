"""Sources of imported prompts: text files, tables, folders, and data sets on the Hugging Face hub."""

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
"""Usual names of the column with the prompts; upper or lower case."""
SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Suffixes of files with prompts; upper or lower case."""
HUB = "hf://datasets/"
"""Optional prefix for the id of a data set, for ids that look like paths."""
HELDOUT_STEMS = ("test", "heldout")
"""Names, without suffix, of files, folders and splits with held-out prompts."""
PICTURES = (".png", ".jpg", ".jpeg", ".webp")
"""Suffixes of image files; upper or lower case."""
REFERENCE, FILE_NAME = "reference", "file_name"
"""Keys of a prompt's reference images. The second is used in ``metadata`` files, as in image folders on the hub."""
_HELP = f"give a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file, a folder with a train and a test file, or the id"


class Entry(NamedTuple):
    """An imported prompt with its reference images."""

    text: str
    references: tuple[Reference, ...] = ()

    @property
    def id(self) -> str:
        return prompt_id(self.text, self.references)


@dataclass(frozen=True, slots=True)
class Lines:
    """The prompts of one split of a source, including repetitions; lines without a prompt have an empty text."""

    entries: list[Entry]
    column: str = ""
    """Name of the column with the prompts; empty if the source has no columns."""


def parts(source: str, column: str) -> tuple[Lines, Lines]:
    """Read the training and the held-out lines of a source. A single file is used entirely for training."""
    path = located(source, "SOURCE")
    if path.is_dir():
        train, heldout = _split(path, ("train",), column), _split(path, HELDOUT_STEMS, column)
        if train is None and heldout is None:
            return _pictures(path, column), Lines([])
        return train or Lines([]), heldout or Lines([])
    if path.exists():
        return read(path, column), Lines([])
    name = source.removeprefix(HUB)
    # Names on the hub may contain dots. A path has a suffix, or begins with an existing folder.
    is_path = re.search(r"^[./~]|\.[A-Za-z]\w*$", name) or Path(name).parent.is_dir()
    if name.count("/") == 1 and all(name.split("/")) and (name != source or not is_path):
        return _of_hub(source, name, column)
    raise UserError(f"There is no {source}; {_HELP} of a data set on the hub, such as {HUB}owner/name.")


def _split(folder: Path, stems: Sequence[str], column: str) -> Lines | None:
    """The lines of a split: from a file named like one of `stems`, else from an image folder of such a name.

    An image folder is ignored if a ``metadata`` file next to it lists the images. None if the split does not exist.
    """
    if file := _file(folder, stems):
        return read(file, column)
    inside = [] if _file(folder, ("metadata",)) else [folder / stem for stem in stems if (folder / stem).is_dir()]
    return _pictures(inside[0], column) if inside else None


def _of_hub(source: str, name: str, column: str) -> tuple[Lines, Lines]:
    """Read the training and the held-out lines of a data set on the hub. A single split is used for training."""
    splits = _dataset(source, name)
    rows = {split: _column(tables.numbered(table, f"{source}, {split}"), column) for split, table in splits.items()}
    train = rows.get("train", next(iter(rows.values())) if len(rows) == 1 else Lines([]))
    return train, next((rows[stem] for stem in HELDOUT_STEMS if stem in rows), Lines([]))


def _pictures(folder: Path, column: str) -> Lines:
    """The prompts of an image folder. Raises UserError if it has no images, or an image without a prompt."""
    if listed := _file(folder, ("metadata",)):
        return read(listed, column)
    images = [path for path in _visible(folder) if path.suffix.lower() in PICTURES]
    if not images:
        raise UserError(
            f"{folder} has neither a train nor a test file ({', '.join(SUFFIXES)}), nor images ({', '.join(PICTURES)})."
        )
    if alone := [path.name for path in images if not path.with_suffix(".txt").is_file()]:
        raise UserError(
            f"{folder} has the image {alone[0]} without a prompt; write its prompt to {Path(alone[0]).stem}.txt, or "
            "all prompts to metadata.jsonl."
        )
    texts = (utf8_text(path.with_suffix(".txt"), str(path.with_suffix(".txt"))).strip() for path in images)
    rows = ((str(path), {"text": text, "reference": path.name}) for path, text in zip(images, texts, strict=True))
    return _column(rows, "text", folder)


def _file(folder: Path, stems: Sequence[str]) -> Path | None:
    """The file with prompts in `folder` that is named like the first possible of `stems`; None if there is none."""
    files = {path.name.lower(): path for path in _visible(folder) if path.is_file()}
    return next((files[f"{stem}{suffix}"] for stem in stems for suffix in SUFFIXES if f"{stem}{suffix}" in files), None)


def _visible(folder: Path) -> list[Path]:
    """Sorted content of a folder without hidden files, such as ``._cat.png``, which macOS writes."""
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]


def read(path: Path, column: str) -> Lines:
    """Read the prompts of one file, without surrounding white space. A pipe is JSONL if it begins with ``{``, else
    text.
    """
    suffix = path.suffix.lower()
    is_pipe = suffix not in SUFFIXES and (path.is_fifo() or path.is_relative_to("/dev"))
    if suffix not in SUFFIXES and not is_pipe:
        raise UserError(f"{path} has an unknown format; {_HELP} of a data set.")
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
        raise UserError(
            f"{path} has more than {MOST_BYTES:,} bytes; write it to files of at most this size and import them."
        )
    return content


def _column(rows: Iterable[Row], column: str, folder: Path | None = None, key: str = REFERENCE) -> Lines:
    """The prompts in rows of a table.

    `key`: column with the paths of reference images, relative to `folder`; if `folder` is None, there are no images.
    """
    wanted, texts, named, counts = "", list[str](), list[tuple[str, str]](), list[int]()
    for location, row in rows:
        if not wanted:
            lower = {name.strip().lower(): name for name in row}
            wanted = column or next((lower[name] for name in COLUMNS if name in lower), "")
            if not wanted or wanted not in row:
                lacking = f"no column {column!r}" if column else f"none of the columns {', '.join(COLUMNS)}"
                raise UserError(f"{location} has {lacking}; it has {', '.join(row)}: choose one with --column.")
        if wanted not in row:
            raise UserError(f"{location} has no {wanted!r}, unlike the first row; it has {', '.join(row)}.")
        texts.append(
            checked_text(row[wanted] if row[wanted] is not None else "", f"{location}, column {wanted!r}").strip()
        )
        files = references.paths(row[key], folder, location) if folder and row.get(key) else []
        named += [(path, location) for path in files]
        counts.append(len(files))
    known = iter(references.known(named, decode=True) if named else ())
    per_prompt = [tuple(next(known) for _ in range(count)) for count in counts]
    return Lines([Entry(text, images) for text, images in zip(texts, per_prompt, strict=True)], wanted)


def _dataset(source: str, name: str) -> Any:
    """Load a data set of the hub with the package 'datasets'."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{source} is not a local file, and reading it from the hub needs the package 'datasets', which is not "
            "installed. Run pip install datasets, or export the prompts to a text, CSV or JSONL file."
        ) from None
    try:
        return datasets.load_dataset(name)
    except Exception as error:  # from the hub, the network or the file format
        raise UserError(f"{source} cannot be loaded: {type(error).__name__}: {error}") from error
