"""The base of all sections of the configuration, and their types of numbers with bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
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
