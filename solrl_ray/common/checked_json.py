"""JSON objects that contain their checksum, to detect altered bytes; and records read from JSON."""

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
    """`record`, converted to plain JSON values, with its checksum added."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(record)))
    return plain | {FIELD: _checksum(plain)}


def parse(content: bytes) -> dict[str, Any]:
    """Parse an object made by `with_checksum`; returns it without the checksum. Raises ValueError, with the reason."""
    try:
        record = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    if FIELD not in record:
        raise ValueError(f"it has no checksum ({FIELD})")
    stated = record.pop(FIELD)
    if stated != _checksum(record):
        raise ValueError("its checksum is not the one that was written")
    return record


def read_record(path: Path, kind: type[T], mend: str) -> T:
    """Read a JSON file as a record, like `as_record`. Raises UserError if it is damaged; `mend` says how to fix it."""
    return as_record(kind, read_json(path, mend), f"{path} ({mend})")


def as_record(kind: type[T], values: Any, where: str) -> T:
    """Convert JSON values to `kind`: a dataclass, or a type with dataclasses as items. Unknown fields are ignored.

    Raises UserError, whose subject is `where`, if a value is missing or of the wrong type.
    """
    try:
        adapter = _adapter(kind)  # type: ignore[arg-type]  # a type can be hashed
        record: T = adapter.validate_python(values)
        return record
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(["", *map(str, first["loc"])])
        raise UserError(f"{where} has no valid {kind.__name__}{field}: {first['msg']}.") from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _checksum(record: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record, sort_keys=True, separators=(',', ':')).encode()):08x}"
