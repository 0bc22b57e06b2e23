"""Loads YAML files and ``--set`` into one validated `Config` and records the source of each value, so that an error can
name the file.

    files, in order ──► includes first ──► deep merge (lists replace) ──► options, --set ──► schema ──► Config
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from solrl_ray.common.files import utf8_text
from solrl_ray.config import named, objectives, previews, problems, samplers, yaml_text
from solrl_ray.config.schema import KINDS, Config
from solrl_ray.errors import UserError

Key = tuple[str | int, ...]
INCLUDE = "include"
MOST_BYTES = 2**18
"""Maximum size of a configuration file, bytes."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of values: key → file name, ``--set`` or another option. Keys without a source have their default."""

    origins: dict[Key, str] = field(default_factory=dict)

    def of(self, key: str | Key) -> str:
        """The source of a key (``rollout.keep``, ``rewards.0.weight``), or ``default``."""
        return self.origins.get(_key(key.split(".")) if isinstance(key, str) else key, "default")

    def named(self, key: str) -> str:
        """The key with its source in parentheses: ``run.root (--set)``."""
        return f"{key} ({self.of(key)})"

    def with_entry(self, name: str, at: int, others: Sources, entry: int) -> Sources:
        """A copy in which the sources of entry `at` of the list `name` are those of entry `entry` in `others`."""
        ours = {key: source for key, source in self.origins.items() if key[:2] != (name, at)}
        theirs = {(name, at, *key[2:]): s for key, s in others.origins.items() if key[:2] == (name, entry)}
        return Sources(ours | theirs)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    config: Config
    sources: Sources


class _Tree:
    """The merged mapping and the origin of each of its nodes."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {
            "objective": {"kind": objectives.DEFAULT},
            "rollout": {"sampler": {"kind": samplers.DEFAULT}},
        }
        self.origins: dict[Key, str] = {}

    def merge(self, into: dict[str, Any], part: dict[str, Any], at: Key, source: str) -> None:
        """Merge a preset into the section at `at`. Mappings are merged; lists and scalars are replaced, and an empty
        mapping ``{}`` replaces any value.
        """
        for name, value in part.items():
            key = (*at, name)
            if value and isinstance(value, dict) and isinstance(into.get(name), dict):
                self._clear_other_kind(key, into[name], value.get("kind"))
                self.merge(into[name], value, key, source)
            else:
                into[name] = copy.deepcopy(value)
                self._mark(key, value, source)

    def _clear_other_kind(self, key: Key, section: dict[str, Any], kind: Any) -> None:
        """Clear a section if its kind changes, because the new kind has different keys."""
        if kind is not None and key in KINDS and section.get("kind") != kind:
            section.clear()
            self._mark(key, section, self.origins.get(key, "default"))

    def _mark(self, key: Key, value: Any, source: str) -> None:
        for old in [old for old in self.origins if old[: len(key)] == key]:
            del self.origins[old]
        self.origins[key] = source
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, inner in items:
            self._mark((*key, name), inner, source)

    def set(self, names: list[str], value: Any, source: str) -> None:
        """Set one dotted key; a whole number selects a list entry. Raises UserError if that entry does not exist."""
        holder: Any = self.values
        for position, name in enumerate(names[:-1]):
            if isinstance(holder, list):
                holder = holder[_index(holder, names[: position + 1], source)]
            else:
                if not isinstance(holder.get(name), dict | list):
                    holder[name] = {}
                    self._mark(_key(names[: position + 1]), {}, source)
                holder = holder[name]
            if not isinstance(holder, dict | list):
                raise UserError(f"{source} {'.'.join(names)}: {'.'.join(names[: position + 1])} has no keys in it.")
        key = _key(names)
        if isinstance(holder, list):
            holder[_index(holder, names, source)] = copy.deepcopy(value)
            self._mark(key, value, source)
        else:
            if names[-1] == "kind":
                self._clear_other_kind(key[:-1], holder, value)
            self.merge(holder, {names[-1]: value}, key[:-1], source)


def _key(names: list[str]) -> Key:
    return tuple(int(name) if name.isdecimal() else name for name in names)


def _index(entries: list[Any], names: list[str], source: str) -> int:
    name, owner = names[-1], ".".join(names[:-1])
    if not name.isdecimal() or int(name) >= len(entries):
        raise UserError(
            f"{source} {'.'.join(names)}: {owner} is a list of {len(entries)} entries, so '{name}' must be "
            f"a whole number below {len(entries)}."
        )
    return int(name)


def read_file(path: Path, included_by: Path | None = None) -> dict[str, Any]:
    """The mapping in one YAML file, `include` not yet resolved. Raises UserError if the file cannot be read or is no
    mapping.
    """
    if not path.is_file():
        missing = "is a pipe or a device; write it to a file" if path.exists() else "does not exist"
        what = named.as_folder(path) or missing
        whose = f", which {included_by} includes," if included_by else ""
        function = f"; a function is named in a YAML file: rewards: [{{kind: '{path}'}}]" if ".py:" in path.name else ""
        raise UserError(f"The configuration file {path}{whose} {what}{function}.")
    try:
        text = utf8_text(path, str(path), MOST_BYTES)
    except OSError as error:
        raise UserError(f"The configuration file {path} cannot be read: {error}.") from None
    tree = yaml_text.parse(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a configuration must be a mapping of keys to values, not {problems.show(tree)}.")
    return tree


def _merge_file(tree: _Tree, path: Path, above: tuple[Path, ...]) -> None:
    if path.resolve() in above:
        raise UserError(f"{above[-1]}: including {path} creates a cycle of includes; remove one of them.")
    part = read_file(path, above[-1] if above else None)
    included = part.pop(INCLUDE, [])
    names = [included] if isinstance(included, str) else included
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"include in {path} is {problems.show(included)}; it must be a list of file names.")
    for file in (path.parent / name for name in names):
        plain = Path(os.path.normpath(file))  # without ``..``, if that is the same file
        same = plain.resolve() == file.resolve()
        _merge_file(tree, plain if same else file, (*above, path.resolve()))
    tree.merge(tree.values, part, (), str(path))


def _override(tree: _Tree, text: str) -> None:
    dotted, equals, value = text.partition("=")
    names = dotted.strip().split(".")
    if not equals or not all(names):
        raise UserError(f"--set {text}: it must have the form key=value, such as rollout.pool=64.")
    takes_text = problems.takes_text(_key(names), tree.values)
    try:
        parsed = yaml_text.parse(value, f"--set {dotted.strip()}")
    except UserError:
        if not takes_text:
            raise
        parsed = ...
    # YAML would read 007 as a number and an empty text as null.
    tree.set(names, value.strip() if takes_text and not isinstance(parsed, str) else parsed, "--set")


def load_with_sources(
    files: Sequence[Path], overrides: Sequence[str] = (), options: Mapping[str, tuple[str, Any]] | None = None
) -> LoadedConfig:
    """Merge `files` in order, apply `options` and then `overrides` (``key.key=value``), and validate; see `load`.

    `options`: key → name of the equivalent command-line option, such as ``--steps``, and its value.
    """
    if not files:
        raise UserError("No configuration file was given.")
    tree = _Tree()
    for path in files:
        _merge_file(tree, Path(path) if isinstance(path, str) else path, ())
    for key, (option, value) in (options or {}).items():
        tree.set(key.split("."), value, option)
    for text in overrides:
        _override(tree, text)
    tree.values["rollout"] = previews.with_micro_batch(tree.values["rollout"])
    sources = Sources(tree.origins)
    try:
        # Strict, so that "24" and 24.5 are rejected as integers; as JSON, so that a YAML list can become a tuple.
        config = Config.model_validate_json(json.dumps(tree.values), strict=True)
    except ValidationError as error:
        given: list[str | Path] = [named.as_argument(Path(path)) or path for path in files]
        raise UserError(problems.sentence(error, tree.values, sources.of, given)) from None
    return LoadedConfig(config, sources)


def load(files: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """Load the configuration of `files` and `overrides`.

    Later files win; mappings are merged, lists and scalars replaced. A file may begin with
    ``include: [other.yaml, …]``, with paths relative to the file; included files are merged before it. `overrides` have
    the form ``rollout.pool=64`` or ``rewards.0.weight=2``, with a YAML value. Raises UserError with a one-sentence
    message.
    """
    return load_with_sources(files, overrides).config


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML, defaults included; `load` reads it back to an equal `Config`."""
    return yaml_text.dump(config.model_dump(mode="json"))
