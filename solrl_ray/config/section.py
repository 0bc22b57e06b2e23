"""The base of all sections of the configuration, and their types of numbers with bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Workers = Annotated[int, Field(ge=1, le=4096)]
"""How many of a kind. A plan puts each one on a card, so a number without bound would keep it busy for hours."""
AboveZero = Annotated[float, Field(gt=0)]
Seconds = AboveZero
AtLeastZero = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
ShareOrZero = Annotated[float, Field(ge=0, le=1)]
Location = Annotated[str, Field(min_length=1)]
"""A path or an id."""


class Section(BaseModel):
    """A section of the configuration: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def changed(self, values: Mapping[str, Any]) -> Self:
        """A copy with other values by dotted key, such as ``learner.micro_batch``; they are not validated."""
        section = self
        for key, value in values.items():
            name, _, rest = key.partition(".")
            value = getattr(section, name).changed({rest: value}) if rest else value
            section = section.model_copy(update={name: value})
        return section

    def value_of(self, key: str) -> Any:
        """The value of a dotted key; a whole number picks an entry of a list. None if this kind of section lacks it."""
        value: Any = self
        for name in key.split("."):
            value = value[int(name)] if isinstance(value, list | tuple) else getattr(value, name, None)
        return value
