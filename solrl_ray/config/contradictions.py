"""A key whose value contradicts another key's, as a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from solrl_ray.config.loading import Sources
from solrl_ray.config.problems import show
from solrl_ray.config.schema import Config
from solrl_ray.config.section import Section


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key; a whole number picks an entry of a list. None if this kind of section lacks it."""
    value: Any = config
    for name in key.split("."):
        value = value[int(name)] if isinstance(value, list | tuple) else getattr(value, name, None)
    return value


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule: the key to change and what would be right."""

    key: str
    right: str

    def sentence(self, config: Config, sources: Sources) -> str:
        value = value_of(config, self.key)
        value = show(value.model_dump() if isinstance(value, Section) else value)
        return f"{self.key} is {value} ({sources.of(self.key)}); it must be {self.right}."
