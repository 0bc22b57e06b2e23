"""What every section of the configuration is made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field

Positive = Annotated[int, Field(ge=1)]
AboveZero = Annotated[float, Field(gt=0)]
AtLeastZero = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A section of the configuration: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def by_kind(default: str) -> Discriminator:
    """Chooses a section's keys by its ``kind``; a section without one is of kind `default`."""

    def kind(value: Any) -> Any:
        return value.get("kind", default) if isinstance(value, dict) else getattr(value, "kind", None)

    return Discriminator(kind)
