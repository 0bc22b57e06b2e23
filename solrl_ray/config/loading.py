"""From YAML files and ``--set`` to one validated `Config`, with the source of each value.

    files, in order ──► includes first ──► deep merge (lists replace) ──► options, --set ──► schema ──► Config

So an error can name the file.
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
"""Of a configuration file."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of values: key → file name, ``--set`` or another option. A key without one has its default."""

    origins: dict[Key, str] = field(default_factory=dict)

    def of(self, key: str | Key) -> str:
        """The source of a key (``rollout.keep``, ``rewards.0.weight``), or ``default``."""
        return self.origins.get(_key(key.split(".")) if isinstance(key, str) else key, "default")

    def named(self, key: str) -> str:
        """``run.root (--set)``."""
        return f"{key} ({self.of(key)})"

    def with_entry(self, name: str, at: int, others: Sources, entry: int) -> Sources:
        """These, with entry `at` of the list `name` taken from where `others` have `entry`."""
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
        """Merge a part into the section at `at`: mappings merge; lists, scalars and what gets ``{}`` are replaced."""
        for name, value in part.items():
            key = (*at, name)
            if value and isinstance(value, dict) and isinstance(into.get(name), dict):
                self._start_anew(key, into[name], value.get("kind"))
                self.merge(into[name], value, key, source)
            else:
                into[name] = copy.deepcopy(value)
                self._mark(key, value, source)

    def _start_anew(self, key: Key, section: dict[str, Any], kind: Any) -> None:
        """Drop a section's keys if it becomes another kind with other keys: a method replaces a method."""
        if kind is not None and key in KINDS and section.get("kind") != kind:
            section.clear()
            self._mark(key, section, self.origins.get(key, "default"))

    def _mark(self, key: Key, value: Any, source: str) -> None:
        for old in [old for old in self.origins if old[: len(key)] == key]:
            del self.origins[old]
        self.origins[key] = source
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, inner in inside:
            self._mark((*key, name), inner, source)

    def set(self, names: list[str], value: Any, source: str) -> None:
        """Set one dotted key; a whole number picks an entry of a list. Raises UserError if there is none."""
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
                self._start_anew(key[:-1], holder, value)
            self.merge(holder, {names[-1]: value}, key[:-1], source)


def _key(names: list[str]) -> Key:
    return tuple(int(name) if name.isdecimal() else name for name in names)


def _index(entries: list[Any], names: list[str], source: str) -> int:
    name, owner = names[-1], ".".join(names[:-1])
    if not name.isdecimal() or int(name) >= len(entries):
        raise UserError(
            f"{source} {'.'.join(names)}: {owner} is a list of {len(entries)}, so '{name}' must be "
            f"a whole number below {len(entries)}."
        )
    return int(name)


def read_file(path: Path, included_by: Path | None = None) -> dict[str, Any]:
    """The mapping in one YAML file, with `include`. Raises UserError if there is none."""
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
        raise UserError(f"{path}: a configuration is a mapping of keys to values, this is {problems.show(tree)}.")
    return tree


def _merge_file(tree: _Tree, path: Path, above: tuple[Path, ...]) -> None:
    if path.resolve() in above:
        raise UserError(f"{above[-1]}: including {path} would go round in a circle.")
    part = read_file(path, above[-1] if above else None)
    included = part.pop(INCLUDE, [])
    names = [included] if isinstance(included, str) else included
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"include in {path} is {problems.show(included)}; it must be a list of file names.")
    for place in (path.parent / name for name in names):
        plain = Path(os.path.normpath(place))  # without ``..`` inside, where that means the same
        same = plain.resolve() == place.resolve()
        _merge_file(tree, plain if same else place, (*above, path.resolve()))
    tree.merge(tree.values, part, (), str(path))


def _override(tree: _Tree, text: str) -> None:
    dotted, equals, value = text.partition("=")
    names = dotted.strip().split(".")
    if not equals or not all(names):
        raise UserError(f"--set {text}: it must read key=value, such as rollout.pool=64.")
    takes_text = problems.takes_text(_key(names), tree.values)
    try:
        parsed = yaml_text.parse(value, f"--set {dotted.strip()}")
    except UserError:
        if not takes_text:
            raise
        parsed = ...
    # YAML would make a number of 007, and nothing of an empty text.
    tree.set(names, value.strip() if takes_text and not isinstance(parsed, str) else parsed, "--set")


def load_with_sources(
    files: Sequence[Path], overrides: Sequence[str] = (), options: Mapping[str, tuple[str, Any]] | None = None
) -> LoadedConfig:
    """Merge `files` in order, apply `options` and then `overrides` (``key.key=value``), validate; see `load`.

    `options`: key → the equivalent option of the command, such as ``--resolution``, and its value.
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
        # Strict, so that "24" or 24.5 is no integer; as JSON, so that a YAML list can be a tuple.
        config = Config.model_validate_json(json.dumps(tree.values), strict=True)
    except ValidationError as error:
        given: list[str | Path] = [named.as_argument(Path(path)) or path for path in files]
        raise UserError(problems.sentence(error, tree.values, sources.of, given)) from None
    return LoadedConfig(config, sources)


def load(files: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """The configuration that `files` and `overrides` describe.

    Later files win; mappings merge, lists and scalars are replaced. A file may begin with ``include: [other.yaml, …]``,
    paths relative to itself, which are merged before it. `overrides` are ``rollout.pool=64`` or ``rewards.0.weight=2``
    with YAML on the right. Raises UserError: one sentence.
    """
    return load_with_sources(files, overrides).config


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML, defaults included; `load` reads an equal `Config` back."""
    return yaml_text.dump(config.model_dump(mode="json"))
