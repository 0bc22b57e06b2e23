"""What the configuration of a resumed run may change, and the number of a run folder's format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from solrl_ray.common.deadlines import in_time
from solrl_ray.common.files import READ_SECONDS, read_regular
from solrl_ray.config import compiled_learner
from solrl_ray.config.loading import Sources, load
from solrl_ray.config.pools import encoder_of, encoding_batch
from solrl_ray.config.problems import listed, show
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError

FILE = "config.yaml"
"""Name of the resolved configuration in a run folder."""
FORMAT_FILE, FORMAT = "format", 7
"""Name and content of the file with a run folder's format. The number rises when a name or a meaning changes; a folder
without the file has format 1.
"""


def stored(run_folder: Path) -> Config:
    """A run folder's configuration. Raises UserError if missing or of another format, RunError if the disk hangs."""

    def read() -> Config:
        if not (run_folder / FILE).is_file():
            raise UserError(f"{run_folder} is not a run folder: it has no {FILE}.")
        check_format(run_folder)
        return load([run_folder / FILE])

    return in_time(read, what=f"reading {run_folder / FILE}", seconds=READ_SECONDS)


def check_format(run_folder: Path) -> None:
    """Raises UserError if a run folder was written by a version with another format."""
    file = run_folder / FORMAT_FILE
    found = read_regular(file, 100).decode(errors="replace").strip() if file.is_file() else "1"
    if not found.isdecimal():
        raise UserError(f"{file} is damaged: it holds {found[:20]!r}, and must hold the number of a format.")
    if found != str(FORMAT):
        raise UserError(
            f"{run_folder} is a run folder of format {found}, and this version reads format {FORMAT}; "
            "use the version that wrote it."
        )


def origin(path: Path) -> Path | None:
    """The run folder that `path` is, or whose checkpoint it is; None if it is neither."""
    if (path / FILE).is_file():
        return path
    run = path.absolute().parent.parent
    return run if (path / "state.json").is_file() and (run / FILE).is_file() else None


def first_difference(one: Config, other: Config, *, free: tuple[str, ...]) -> str | None:
    """The first dotted key, in the schema's order, whose values differ; keys under `free` may differ."""
    left, right = _leaves(one), _leaves(other)
    under_free = tuple(f"{name}." for name in free)
    for key in dict.fromkeys((*left, *right)):
        if not f"{key}.".startswith(under_free) and left.get(key, ...) != right.get(key, ...):
            return key
    return None


SHOWN_APART = ("evaluation.reference", "evaluation.pictures")
"""Keys of what an evaluation shows, and not of what it measures."""
FREE = (
    "fleet",
    "learner.world_size",
    "run.iterations",
    "run.on_collapse",
    "fidelity.on_low",
    "evaluation.every",
    "checkpoints",
    "tracking",
    "compile.cache",
    "run.root",
    "run.name",
)
"""What a resumed run may change. Root and name are only the folder's place. A learner's state does not depend on world
size (`learning.state`), so a run that has lost a card can go on.
"""


_SPLITS_SUMS = ("fleet.explorers.threads", "fleet.regenerators.threads", "fleet.learners.threads", "learner.world_size")


def inherit_from(given: Config, was: Config) -> Config:
    """`given` with the values that the run wrote when it began."""
    given = compiled_learner.inherit_from(given, was)
    return given.changed({"run.init_digest": given.run.init_digest or was.run.init_digest})


def check(given: Config, was: Config, run_folder: Path, sources: Sources) -> None:
    """Refuse to resume the run in `run_folder`, configured as `was`, with another configuration.

    Raises UserError that names the first key that differs.
    """
    key = first_difference(given, was, free=FREE)
    if key is not None:
        raise UserError(
            f"{key} is {_shown(given, key)} ({sources.of(key)}), but the run in {run_folder} was begun with "
            f"{_shown(was, key)}; a resumed run may change only {listed(FREE[:-2])}."
            + _otherwise(key, _leaves(given), run_folder)
        )


def _otherwise(key: str, leaves: Mapping[str, Any], run_folder: Path) -> str:
    """How to evaluate with another value of a key that a run's evaluations share; empty for other keys."""
    if not key.startswith("evaluation.") or key.startswith(SHOWN_APART) or key not in leaves:
        return ""
    value = "null" if leaves[key] is None else show(leaves[key])
    return (
        " Its evaluations are compared with each other, so all are made alike; leave the key out, and evaluate "
        f"otherwise with `solrl eval {run_folder} --set {key}={value}`."
    )


def notes(given: Config, was: Config) -> list[str]:
    """Notes on allowed changes: some sum in another order."""
    said = []
    encoded = [
        (bool(encoder_of(c.fleet).num_gpus), encoder_of(c.fleet).threads, encoding_batch(c.fleet)) for c in (given, was)
    ]
    if encoded[0] != encoded[1]:
        said.append(
            "fleet.encoders or fleet.placement encode prompts on another kind of device, with other threads or another "
            "micro-batch than before: embeddings may differ in their last bits, and so may the bytes."
        )
    return said + [
        f"{key} is {now} and was {before}: seeds stay the same, but sums are split differently, so the bytes "
        "may differ from an undisturbed run."
        for key in _SPLITS_SUMS
        if (now := given.value_of(key)) != (before := was.value_of(key))
    ]


def _leaves(config: Config) -> dict[str, object]:
    """Dotted key → value of all keys that are not sections; a list of plain values is one value."""
    leaves: dict[str, object] = {}

    def walk(value: object, key: str) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(inner, f"{key}.{name}" if key else str(name))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for position, inner in enumerate(value):
                walk(inner, f"{key}.{position}")
        else:
            leaves[key] = value

    walk(config.model_dump(mode="json"), "")
    return leaves


def _shown(config: Config, key: str) -> str:
    leaves = _leaves(config)
    return show(leaves[key]) if key in leaves else "not there"
