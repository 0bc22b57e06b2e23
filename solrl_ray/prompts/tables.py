"""Rows of CSV, TSV, JSON and JSONL files: each with where it stands, for messages, and its values by column."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from solrl_ray.common.files import MOST_BYTES, read_json, read_regular, stand_in
from solrl_ray.errors import UserError
from solrl_ray.prompts.prompt_set import json_object

Row = tuple[str, dict[str, Any]]
Line = tuple[str, str]
"""Of a file: where it stands, and its text."""


def numbered(table: Iterable[dict[str, Any]], source: str) -> Iterator[Row]:
    """Of a table that has them already."""
    return ((f"{source}, row {number}", row) for number, row in enumerate(table, 1))


def of_jsonl(lines: Sequence[Line]) -> Iterator[Row]:
    return ((place, json_object(line, place)) for place, line in lines if line.strip())


def of_json(path: Path) -> Iterator[Row]:
    """Of a JSON file: a list of objects, or of prompts, whose column is then ``text``."""
    entries = read_json(path)
    if not isinstance(entries, list):
        raise UserError(f"{path} is no list; right is a list of prompts, or of objects with a prompt each.")
    objects = (entry if isinstance(entry, dict) else {"text": entry} for entry in entries)
    return ((f"{path}, entry {number}", entry) for number, entry in enumerate(objects, 1))


def of_parquet(path: Path) -> list[dict[str, Any]]:
    """The rows of a parquet file. Not by the package 'datasets', which takes brackets in a name for a pattern."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{path} is read with the package 'pyarrow', which is not installed: pip install pyarrow, or export the "
            "prompts to a text, CSV or JSONL file."
        ) from None
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.ParquetFile(path).read().to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {stand_in(read_regular(path)) or error}.") from error
    return rows


def of_csv(text: str, path: Path) -> Iterator[Row]:
    return _named(_commas(text, path), str(path), "a prompt with a comma must be in double quotes", ",")


def _commas(text: str, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Where each row of a CSV file begins, and its fields; empty lines are left out."""
    # Strict: else an unclosed quote would join all following lines into one prompt.
    csv.field_size_limit(MOST_BYTES)  # else 131,072 characters, for all of the process
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


def of_tsv(lines: Sequence[Line], path: Path) -> Iterator[Row]:
    """The format has no quotes; only if all of the file are as CSV has them, they are dropped."""
    rows = [(place, line.split("\t")) for place, line in lines if line.strip()]
    quoted = all(_QUOTED.fullmatch(field) for _, fields in rows for field in fields if '"' in field)
    plain = ((p, [f.strip()[1:-1].replace('""', '"') if quoted and '"' in f else f for f in fs]) for p, fs in rows)
    return _named(plain, str(path), "a prompt can have no tab", "\t")


_QUOTED = re.compile(r'\s*"([^"]|"")*"\s*')


def _named(rows: Iterator[tuple[str, list[str]]], source: str, mend: str, separator: str) -> Iterator[Row]:
    """Rows by the names of the first one. Raises UserError: another number of fields than names."""
    _, names = next(rows, ("", list[str]()))
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{source} has two columns {twice[0]!r}; each needs a name of its own.")
    for place, fields in rows:
        if len(fields) != len(names):
            shown = repr(separator.join(fields))
            raise UserError(
                f"{place} has {len(fields)} fields, its header {len(names)} ({', '.join(names)}): {shown:.200}; {mend}."
            )
        yield place, dict(zip(names, fields, strict=True))
