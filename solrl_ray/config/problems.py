"""Turns a schema error into one sentence: the key, its file, its value, and the key or value probably meant."""

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
"""Keys that do not exist but are often expected → the keys with that meaning."""

_NAMED = {"model": "a model", "rewards": "a reward"}
"""Keys that every run needs, except `_PROMPTS` → the kind of preset that sets them."""

_PROMPTS = "prompts"
PROMPT_FILES = "give --set prompts.train=FILE --set prompts.heldout=FILE"
"""Advice if a run has no prompts."""


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
    """The known name that was probably meant: the first that starts with `name`, else the one with the most similar
    spelling; None if no name is similar enough.
    """
    names = list(known)
    longer = [candidate for candidate in names if name and candidate.startswith(name)]
    return next(iter(longer or difflib.get_close_matches(name, names, n=1, cutoff=cutoff)), None)


def dotted(key: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in key)


def sentence(
    error: ValidationError,
    values: dict[str, Any],
    source_of: Callable[[tuple[str | int, ...]], str],
    files: Sequence[str | Path],
) -> str:
    """One validation error as a sentence: the first unknown key if any, else the first error."""
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
        # pydantic's messages use JSON's terms; the user wrote YAML.
        reason = detail["msg"].replace("a valid array", "a list").replace("an object", "a section")
        reason = "too few entries" if too_short else reason[:1].lower() + reason[1:]
        reason += "; write it in quotes" if detail["type"] == "string_type" else ""
        text = f"{dotted(key)} in {source_of(key)} is {show(_at(values, key))}: {reason}."
    return text


def _missing(key: Sequence[str | int], details: Sequence[ErrorDetails], files: str) -> str:
    """The sentence for a missing key. If every run needs the key, other missing keys of that kind are named, too."""
    needed = [*_NAMED, _PROMPTS]
    absent = [detail["loc"][0] for detail in details if detail["type"] == "missing" and len(detail["loc"]) == 1]
    keys = [name for name in needed if name in absent] if dotted(key) in needed else [dotted(key)]
    presets = [_NAMED[name] for name in keys if name in _NAMED]
    actions = [f"name {listed(presets)}, too (`solrl list` shows them)"] if presets else []
    actions += [PROMPT_FILES] if _PROMPTS in keys else []
    advice = f"; {', and '.join(actions)}" if actions else ""
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
    """The section classes in an annotation, also inside ``list[…]`` and ``Annotated[…]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _without_kinds(location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The key of an error as the user wrote it, without the section kinds that pydantic inserts."""
    for section in KINDS:
        if location[: len(section)] == section:
            location = section + location[len(section) + 1 :]
    return location


def _section(key: Sequence[str | int], values: dict[str, Any]) -> dict[str, FieldInfo]:
    """Fields of the section `key` by name; empty if `key` is not a section.

    If the section has several kinds, `values` decides which one.
    """
    section: type[BaseModel] | None = Config
    for position, part in enumerate(key):
        if isinstance(part, int):
            continue
        found = section.model_fields.get(part) if section else None
        section = _chosen(found.annotation, _at(values, key[: position + 1])) if found else None
    return section.model_fields if section else {}


def takes_text(key: Sequence[str | int], values: dict[str, Any]) -> bool:
    """Whether the key's value is always text, even if it looks like a number."""
    found = _section(key[:-1], values).get(str(key[-1]))
    return found is not None and found.annotation is str


def _of_a_section(key: Sequence[str | int], values: dict[str, Any]) -> str:
    """Description of the section `key`: its keys, and a suggestion if its first key accepts the given value."""
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
    """The annotation's section class with the value's kind, else the first section class."""
    models = list(_models(annotation))
    kind = value.get("kind") if isinstance(value, dict) else None
    of_kind = [m for m in models if "kind" in m.model_fields and kind in get_args(m.model_fields["kind"].annotation)]
    return next(iter(of_kind or models), None)


def keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, sections before their fields; a list entry is written ``rewards.0``."""
    for name, info in section.model_fields.items():
        yield prefix + name
        for inner in _models(info.annotation):
            index = "0." if get_origin(info.annotation) is list else ""
            yield from keys(inner, f"{prefix}{name}.{index}")


def _suggestion(key: Sequence[str | int], values: dict[str, Any]) -> str:
    name, siblings = str(key[-1]), _section(key[:-1], values)
    elsewhere = [known for known in keys() if known.rpartition(".")[2] == name]
    near = nearest(name, siblings)
    if dotted(key) in elsewhere:
        return (
            f"this kind of {dotted(key[:-1])} has the keys {', '.join(siblings)}; probably a file for another kind is "
            "merged before the file that sets this kind."
        )
    if dotted(key) in _MEANT:
        return f"did you mean {_MEANT[dotted(key)]}?"
    if near:
        return f"did you mean {dotted((*key[:-1], near))}?"
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    if everywhere := nearest(dotted(key), keys(), cutoff=0.5):
        return f"the nearest key is {everywhere}."
    return f"the keys of this section are {', '.join(siblings)}."
