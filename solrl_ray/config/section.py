"""The base class of all configuration sections, and number types with bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Workers = Annotated[int, Field(ge=1, le=4096)]
"""Number of workers. The bound keeps plans fast, because a plan assigns every worker to a GPU."""
AboveZero = Annotated[float, Field(gt=0)]
Seconds = AboveZero
AtLeastZero = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
ShareOrZero = Annotated[float, Field(ge=0, le=1)]
Location = Annotated[str, Field(min_length=1)]
"""A path or an id."""


class Section(BaseModel):
    """A section of the configuration: immutable; unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def changed(self, values: Mapping[str, Any]) -> Self:
        """A copy with the given values by dotted key, such as ``learner.micro_batch``. The values are not validated."""
        section = self
        for key, value in values.items():
            name, _, rest = key.partition(".")
            value = getattr(section, name).changed({rest: value}) if rest else value
            section = section.model_copy(update={name: value})
        return section

    def value_of(self, key: str) -> Any:
        """The value of a dotted key; a whole number selects a list entry. None if this section lacks the key."""
        value: Any = self
        for name in key.split("."):
            value = value[int(name)] if isinstance(value, list | tuple) else getattr(value, name, None)
        return value
