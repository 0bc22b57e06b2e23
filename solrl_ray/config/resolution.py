"""The key `model.resolution`: how the shape of samples is written."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from solrl_ray.config.section import Positive
from solrl_ray.records import SampleShape


def _checked(value: Any) -> Any:
    """A union of types would give one error for each of them."""
    if _is_side(value):
        return value
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_side, value)):
        return tuple(value)
    raise PydanticCustomError("resolution", "it must be a number of pixels above 0, or [height, width]")


def _is_side(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


Resolution: TypeAlias = Annotated[Positive | tuple[Positive, Positive], BeforeValidator(_checked)]


def shape_of(resolution: int | tuple[int, int], frames: int | None = None) -> SampleShape:
    """One number is a square; without frames it is a picture."""
    height, width = (resolution, resolution) if isinstance(resolution, int) else resolution
    return SampleShape(height, width, frames or 0)
