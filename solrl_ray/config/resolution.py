"""The key `model.resolution`: parsing and writing of sample shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from solrl_ray.config.section import Positive
from solrl_ray.records import SampleShape

Pair = tuple[Positive, Positive]
MOST = 8
"""Maximum number of shapes per run: every worker compiles each shape separately (`models.compilation.VARIANTS`)."""


def as_shape(value: Any) -> SampleShape:
    """The shape of a side or of ``[height, width]``, pixels. Raises ValueError for anything else."""
    sides = value if isinstance(value, (list, tuple)) else (value, value)
    if len(sides) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides):
        raise ValueError("it must be a whole number of pixels above 0, or two of them as [height, width]")
    return SampleShape(*sides)


class Shapes(tuple[SampleShape, ...]):
    """The configured sample shapes of a run."""

    @property
    def largest(self) -> SampleShape:
        """The shape with the most pixels."""
        return max(self, key=lambda shape: shape.pixels)

    @property
    def smallest(self) -> SampleShape:
        """The shape with the fewest pixels."""
        return min(self, key=lambda shape: shape.pixels)

    @property
    def volume(self) -> float:
        """Mean number of pixels per sample, over all its frames."""
        return sum(shape.volume for shape in self) / len(self)

    def with_frames(self, frames: int) -> Shapes:
        """The shapes as videos of `frames` frames; 0: images."""
        return Shapes(replace(shape, frames=frames) for shape in self)

    def __str__(self) -> str:
        """``512 px``, or ``512 x 512 or 512 x 768 px (height x width)``."""
        if len(self) == 1:
            return str(self[0])
        pairs = [f"{shape.height} x {shape.width}" for shape in self]
        frames = f", {self[0].frames} frames" if self[0].frames else ""
        return f"{', '.join(pairs[:-1])} or {pairs[-1]} px (height x width){frames}"


def as_shapes(value: Any) -> Shapes:
    """The shapes of one shape or of a list of pairs. Raises ValueError for anything else, for more than `MOST` shapes
    and for a repeated shape.
    """
    pairs = value if isinstance(value, (list, tuple)) else ()
    try:
        if not pairs or not all(isinstance(pair, (list, tuple)) for pair in pairs):
            return Shapes([as_shape(value)])
        shapes = Shapes(map(as_shape, pairs))
    except ValueError as error:
        raise ValueError(f"{error}, or a list of such pairs") from None
    if len(shapes) > MOST:
        raise ValueError(f"it must be at most {MOST} shapes, each of which is compiled separately, not {len(shapes)}")
    if twice := next((shape for shape in shapes if shapes.count(shape) > 1), None):
        raise ValueError(f"[{twice.height}, {twice.width}] is listed twice; name each shape once")
    return shapes


def written(shapes: Sequence[SampleShape]) -> int | tuple[int, int] | list[tuple[int, int]]:
    """Image shapes in canonical form: a side, a pair or a list of pairs. Loaded configurations use this form."""
    pairs = [(shape.height, shape.width) for shape in shapes]
    (height, width), *others = pairs
    if others:
        return pairs
    return height if height == width else (height, width)


def _written_by(read: Callable[[Any], Sequence[SampleShape]]) -> BeforeValidator:
    def checked(value: Any) -> Any:
        try:  # a union of types would report one error per type
            return written(read(value))
        except ValueError as error:
            raise PydanticCustomError("resolution", str(error)) from None  # type: ignore[arg-type]

    return BeforeValidator(checked)


OneShape: TypeAlias = Annotated[Positive | Pair, _written_by(lambda given: [as_shape(given)])]
Resolution: TypeAlias = Annotated[Positive | Pair | list[Pair], _written_by(as_shapes)]
