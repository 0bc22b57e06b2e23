"""Turns a schema error into one sentence: the key, its file, its value, and what was probably meant."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from solrl_ray.config import removed
from solrl_ray.config.schema import KINDS, Config

_MEANT = {
    "fleet.learners.count": "learner.world_size",
    "fleet.sharing": "fleet.placement",
    "rollout.micro_batch": "rollout.explore.micro_batch",
    "rollout.preview.micro_batch": "rollout.explore.micro_batch",
    "rollout.seeds": "rollout.pool",
}
"""Keys that do not exist but are often expected → the keys that have their meaning."""

_NAMED = {"model": "a model", "rewards": "a reward"}
"""Keys that every run needs, but for `_PROMPTS` → the parts that have them."""

_PROMPTS = "prompts"
PROMPT_FILES = "give --set prompts.train=FILE --set prompts.heldout=FILE"
"""What to do if a run has no prompts."""


def show(value: Any) -> str:
    """A value as the user wrote it, shortened for a sentence."""
    text = "empty" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def listed(words: Sequence[object]) -> str:
    """``a, b and c``."""
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last


def counted(count: float, noun: str) -> str:
    """``1 rank``, ``0.5 CPUs``, ``8 ranks``, ``2,400 ranks``."""
    shown = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{shown} {noun}{'' if shown == '1' else 's'}"


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that was probably meant: one that begins so, else one that is spelt alike; None: no such."""
    names = list(known)
    begun = [each for each in names if name and each.startswith(name)]
    return next(iter(begun or difflib.get_close_matches(name, names, n=1, cutoff=cutoff)), None)


def dotted(key: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in key)


def sentence(
    error: ValidationError,
    values: dict[str, Any],
    source_of: Callable[[tuple[str | int, ...]], str],
    files: Sequence[str | Path],
) -> str:
    """One of a validation's errors as a sentence: a misspelt key if there is one, else the first."""
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    detail = details[0]
    where = _without_kinds(detail["loc"])
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        where = (*where, "kind")
    # A list of fixed length that is too short lacks an entry, not a key.
    too_short = detail["type"] == "missing" and isinstance(where[-1], int) and isinstance(_at(values, where[:-1]), list)
    key = where[:-1] if too_short else where
    if detail["type"] == "extra_forbidden":
        text = f"Unknown key {dotted(key)} in {source_of(key)}; {_suggestion(key, values)}"
        if known := removed.KEYS.get(dotted([0 if isinstance(part, int) else part for part in key])):
            text = f"The key {dotted(key)} in {source_of(key)} was removed: {known}."
    elif detail["type"] in ("missing", "union_tag_not_found") and not too_short:
        section = _at(values, key[:-1]) if len(key) > 1 else None
        text = _missing(key, details, source_of(key[:-1]) if section is not None else ", ".join(map(str, files)))
    elif detail["type"] in ("model_type", "dict_type"):
        text = f"{dotted(key)} in {source_of(key)} is {show(_at(values, key))}; it must be {_of_a_section(key, values)}"
    else:
        said = detail["msg"].replace("a valid array", "a list").replace("an object", "a section")  # of JSON and of YAML
        said = "too few entries" if too_short else said[:1].lower() + said[1:]
        said += "; write it in quotes" if detail["type"] == "string_type" else ""
        text = f"{dotted(key)} in {source_of(key)} is {show(_at(values, key))}: {said}."
    return text


def _missing(key: Sequence[str | int], details: Sequence[ErrorDetails], files: str) -> str:
    """The sentence on a missing key. If every run needs it, the other missing ones of that kind are named, too."""
    needed = [*_NAMED, _PROMPTS]
    absent = [detail["loc"][0] for detail in details if detail["type"] == "missing" and len(detail["loc"]) == 1]
    keys = [name for name in needed if name in absent] if dotted(key) in needed else [dotted(key)]
    parts = [_NAMED[name] for name in keys if name in _NAMED]
    ways = [f"name {listed(parts)}, too (`solrl list` shows them)"] if parts else []
    ways += [PROMPT_FILES] if _PROMPTS in keys else []
    advice = f"; {', and '.join(ways)}" if ways else ""
    if len(keys) > 1:
        return f"The keys {listed(keys)} are missing from {files}{advice}."
    return f"The key {keys[0]} is missing from {files}{advice}."


def _at(values: Any, key: Sequence[str | int]) -> Any:
    for part in key:
        inside = values if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ()
        if part not in inside:
            return values
        values = values[part]
    return values


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections in an annotation, also inside ``list[…]`` and ``Annotated[…]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _without_kinds(location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The key of an error, as the user wrote it: pydantic inserts the kind of a section."""
    for section in KINDS:
        if location[: len(section)] == section:
            location = section + location[len(section) + 1 :]
    return location


def _section(key: Sequence[str | int], values: dict[str, Any]) -> dict[str, FieldInfo]:
    """The fields in the section of `key` by name; empty if there is none.

    `values` decides the section's kind where there are several.
    """
    section: type[BaseModel] | None = Config
    for position, part in enumerate(key):
        if isinstance(part, int):
            continue
        found = section.model_fields.get(part) if section else None
        section = _chosen(found.annotation, _at(values, key[: position + 1])) if found else None
    return section.model_fields if section else {}


def takes_text(key: Sequence[str | int], values: dict[str, Any]) -> bool:
    """Whether the key's value is a text, whatever it looks like."""
    found = _section(key[:-1], values).get(str(key[-1]))
    return found is not None and found.annotation is str


def _of_a_section(key: Sequence[str | int], values: dict[str, Any]) -> str:
    """What is right in place of a value that is no section: its keys, and the first one if that takes the value."""
    fields, value = _section(key, values), _at(values, key)
    first = next(iter(fields), "")
    keys = f" with the keys {listed(list(fields))}" if len(fields) > 1 else ""
    meant = first and _takes(fields[first], value)
    return f"a section{keys}; did you mean {dotted((*key, first))}?" if meant else f"a section{keys}."


def _takes(info: FieldInfo, value: Any) -> bool:
    try:
        TypeAdapter(info.rebuild_annotation()).validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return False
    return True


def _chosen(annotation: Any, value: Any) -> type[BaseModel] | None:
    """The annotation's section of the value's kind, else the first."""
    models = list(_models(annotation))
    kind = value.get("kind") if isinstance(value, dict) else None
    fitting = [m for m in models if "kind" in m.model_fields and kind in get_args(m.model_fields["kind"].annotation)]
    return next(iter(fitting or models), None)


def keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, sections before their fields; an entry of a list is ``rewards.0``."""
    for name, info in section.model_fields.items():
        yield prefix + name
        for inner in _models(info.annotation):
            index = "0." if get_origin(info.annotation) is list else ""
            yield from keys(inner, f"{prefix}{name}.{index}")


def _suggestion(key: Sequence[str | int], values: dict[str, Any]) -> str:
    name, here = str(key[-1]), _section(key[:-1], values)
    elsewhere = [known for known in keys() if known.rpartition(".")[2] == name]
    near = nearest(name, here)
    if dotted(key) in elsewhere:
        return (
            f"this kind of {dotted(key[:-1])} has the keys {', '.join(here)}, and a file for another kind comes before "
            "the one that names this kind."
        )
    if dotted(key) in _MEANT:
        return f"did you mean {_MEANT[dotted(key)]}?"
    if near:
        return f"did you mean {dotted((*key[:-1], near))}?"
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    if everywhere := nearest(dotted(key), keys(), cutoff=0.5):
        return f"the nearest one is {everywhere}."
    return f"the keys there are {', '.join(here)}."
