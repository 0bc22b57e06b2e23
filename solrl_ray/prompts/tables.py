"""Reads rows of CSV, TSV, JSON, JSONL and parquet files."""

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
"""Location of a row, for error messages, and its values by column."""
Line = tuple[str, str]
"""Location of a line in a file, for error messages, and its text."""


def numbered(table: Iterable[dict[str, Any]], source: str) -> Iterator[Row]:
    """The rows of a table, with their locations in `source`."""
    return ((f"{source}, row {number}", row) for number, row in enumerate(table, 1))


def of_jsonl(lines: Sequence[Line]) -> Iterator[Row]:
    """The rows of a JSONL file; empty lines are skipped."""
    return ((location, json_object(line, location)) for location, line in lines if line.strip())


def of_json(path: Path) -> Iterator[Row]:
    """The rows of a JSON file: a list of objects, or a list of prompts, which become the column ``text``."""
    entries = read_json(path)
    if not isinstance(entries, list):
        raise UserError(
            f"{path} is not a list; it must be a list of prompts, or a list of objects with one prompt each."
        )
    objects = (entry if isinstance(entry, dict) else {"text": entry} for entry in entries)
    return ((f"{path}, entry {number}", entry) for number, entry in enumerate(objects, 1))


def of_parquet(path: Path) -> list[dict[str, Any]]:
    """The rows of a parquet file.

    Uses pyarrow rather than the package 'datasets', which interprets brackets in file names as patterns.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{path} needs the package 'pyarrow', which is not installed. Run pip install pyarrow, or export the "
            "prompts to a text, CSV or JSONL file."
        ) from None
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.ParquetFile(path).read().to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {stand_in(read_regular(path)) or error}.") from error
    return rows


def of_csv(text: str, path: Path) -> Iterator[Row]:
    """The rows of a CSV file, whose first line has the column names."""
    return _named(_commas(text, path), str(path), "a prompt with a comma must be in double quotes", ",")


def _commas(text: str, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Location (first line) and fields of each row of a CSV file; empty lines are skipped."""
    # Strict, because otherwise an unclosed quote would join all following lines into one prompt.
    csv.field_size_limit(MOST_BYTES)  # the default is 131,072 characters; applies to the whole process
    table = csv.reader(io.StringIO(text, newline=""), strict=True)
    begin = 1
    try:
        for fields in table:
            if fields:
                yield f"{path}, line {begin}", fields
            begin = table.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}, line {begin}: {error}; put a field with a quote in double quotes, and double the quotes inside."
        ) from error


def of_tsv(lines: Sequence[Line], path: Path) -> Iterator[Row]:
    """The rows of a TSV file, whose first line has the column names.

    TSV has no quoting. If all quotes in the file are used as in CSV, they are removed; otherwise they are kept.
    """
    rows = [(location, line.split("\t")) for location, line in lines if line.strip()]
    quoted = all(_QUOTED.fullmatch(field) for _, fields in rows for field in fields if '"' in field)
    plain = ((p, [f.strip()[1:-1].replace('""', '"') if quoted and '"' in f else f for f in fs]) for p, fs in rows)
    return _named(plain, str(path), "a prompt must not contain a tab", "\t")


_QUOTED = re.compile(r'\s*"([^"]|"")*"\s*')


def _named(rows: Iterator[tuple[str, list[str]]], source: str, fix: str, separator: str) -> Iterator[Row]:
    """Rows with the column names of the first row. Raises UserError if a row does not have one field per name.

    `fix`: likely cause, for the error.
    """
    _, names = next(rows, ("", list[str]()))
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{source} has two columns named {twice[0]!r}; give each column a unique name.")
    for location, fields in rows:
        if len(fields) != len(names):
            shown = repr(separator.join(fields))
            raise UserError(
                f"{location} has {len(fields)} fields, but its header has {len(names)} ({', '.join(names)}): "
                f"{shown:.200}; {fix}."
            )
        yield location, dict(zip(names, fields, strict=True))
