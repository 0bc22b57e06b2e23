"""``solrl config``: a commented YAML configuration to start from, every key explained, defaults as comments."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from solrl_ray.config import yaml_text
from solrl_ray.config.loading import LoadedConfig, Sources

WIDTH = 110


def to_commented_yaml(loaded: LoadedConfig, title: str) -> str:
    """Commented YAML that loads as an equal configuration."""
    return "\n".join([f"# {title}", *_section(loaded.config, (), loaded.sources, "")]) + "\n"


def _section(section: BaseModel, key: tuple[str | int, ...], sources: Sources, indent: str) -> Iterator[str]:
    for name, info in type(section).model_fields.items():
        value, path = getattr(section, name), (*key, name)
        dotted = ".".join(map(str, path))
        given = any(origin[: len(path)] == path for origin in sources.origins)
        if not indent:
            yield ""
        text = " ".join((info.description or "").replace("``", "`").split())
        yield from (f"{indent}# {line}" for line in textwrap.wrap(text, WIDTH - len(indent) - 2))
        if isinstance(value, BaseModel):
            lines = list(_section(value, path, sources, indent + "  "))
            live = any(line.strip() and not line.lstrip().startswith("#") for line in lines)
            yield f"{indent}{name}:" if live else f"{indent}# {name}:"
            yield from lines
        else:
            origin = f"  # from {sources.of(dotted).rpartition('/')[2]}" if given else ""
            yield from _entry(name, value, indent, origin, live=given)


def _entry(name: str, value: Any, indent: str, origin: str, *, live: bool) -> Iterator[str]:
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        value = [entry.model_dump(mode="json", exclude_defaults=True) for entry in value]
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    first, *more = yaml_text.dump({name: list(plain) if isinstance(plain, tuple) else plain}).rstrip("\n").split("\n")
    mark = "" if live else "# "
    yield f"{indent}{mark}{first}{origin}"
    yield from (f"{indent}{mark}{line}" for line in more)
