"""JSON objects with their own checksum, which reveals an altered byte, and records read from JSON."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from solrl_ray.common.files import read_json
from solrl_ray.errors import UserError

T = TypeVar("T")

FIELD = "crc32"
"""CRC-32, in hex, over the object's other keys as canonical JSON."""


def with_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record`, as JSON has it, and its checksum."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(record)))
    return plain | {FIELD: _checksum(plain)}


def parse(content: bytes) -> dict[str, Any]:
    """The object that `with_checksum` made, without the checksum. Raises ValueError, with a reason, otherwise."""
    try:
        record = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")
    if FIELD not in record:
        raise ValueError(f"it has no checksum ({FIELD})")
    stated = record.pop(FIELD)
    if stated != _checksum(record):
        raise ValueError("its checksum is not the one that was written")
    return record


def read_record(path: Path, kind: type[T], mend: str) -> T:
    """A JSON file as `as_record`. Raises UserError if it is damaged, with its name and how to `mend` it."""
    return as_record(kind, read_json(path, mend), f"{path} ({mend})")


def as_record(kind: type[T], values: Any, where: str) -> T:
    """JSON values as a dataclass, or another type with items of one; fields that it does not know are left out.

    Raises UserError, whose subject is `where`, for a missing value or one of another type.
    """
    try:
        adapter = _adapter(kind)  # type: ignore[arg-type]  # a type can be hashed
        found: T = adapter.validate_python(values)
        return found
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(["", *map(str, first["loc"])])
        raise UserError(f"{where} has no valid {kind.__name__}{place}: {first['msg']}.") from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _checksum(record: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record, sort_keys=True, separators=(',', ':')).encode()):08x}"
