"""Checks on resume: allowed changes of the configuration, and the format number of the run folder."""

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
"""File in a run folder with the resolved configuration."""
FORMAT_FILE, FORMAT = "format", 7
"""Name and content of the file with the format number of a run folder. The number increases when a name or a meaning
changes. A folder without this file has format 1.
"""


def stored(run_folder: Path) -> Config:
    """Load the configuration of a run folder.

    Raises UserError if it is missing or has another format, RunError if the disk hangs.
    """

    def read() -> Config:
        if not (run_folder / FILE).is_file():
            raise UserError(f"{run_folder} is not a run folder: it has no {FILE}.")
        check_format(run_folder)
        return load([run_folder / FILE])

    return in_time(read, what=f"reading {run_folder / FILE}", seconds=READ_SECONDS)


def check_format(run_folder: Path) -> None:
    """Raise UserError if a version with another format wrote the run folder."""
    file = run_folder / FORMAT_FILE
    written = read_regular(file, 100).decode(errors="replace").strip() if file.is_file() else "1"
    if not written.isdecimal():
        raise UserError(f"{file} is damaged: it contains {written[:20]!r} instead of a format number.")
    if written != str(FORMAT):
        raise UserError(
            f"{run_folder} is a run folder of format {written}, but this version reads format {FORMAT}. "
            "Use the version that wrote it."
        )


def origin(path: Path) -> Path | None:
    """The run folder of `path`, which may be a run folder or one of its checkpoints; None if it is neither."""
    if (path / FILE).is_file():
        return path
    run = path.absolute().parent.parent
    return run if (path / "state.json").is_file() and (run / FILE).is_file() else None


def first_difference(one: Config, other: Config, *, free: tuple[str, ...]) -> str | None:
    """The first dotted key, in the order of the schema, with different values. Keys under `free` are ignored."""
    left, right = _leaves(one), _leaves(other)
    under_free = tuple(f"{name}." for name in free)
    for key in dict.fromkeys((*left, *right)):
        if not f"{key}.".startswith(under_free) and left.get(key, ...) != right.get(key, ...):
            return key
    return None


SHOWN_APART = ("evaluation.reference", "evaluation.pictures")
"""Keys that affect what an evaluation shows, but not what it measures."""
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
"""Keys that a resumed run may change. Root and name only say where the folder is. The learner state does not depend on
the world size (`learning.state`), so a run that has lost a GPU can continue.
"""


_SPLITS_SUMS = ("fleet.explorers.threads", "fleet.regenerators.threads", "fleet.learners.threads", "learner.world_size")


def inherit_from(given: Config, was: Config) -> Config:
    """`given`, completed with the values that the run determined when it began."""
    given = compiled_learner.inherit_from(given, was)
    return given.changed({"run.init_digest": given.run.init_digest or was.run.init_digest})


def check(given: Config, was: Config, run_folder: Path, sources: Sources) -> None:
    """Check that the run in `run_folder`, configured as `was`, may be resumed with the configuration `given`.

    Raises UserError naming the first key that differs and may not.
    """
    key = first_difference(given, was, free=FREE)
    if key is not None:
        raise UserError(
            f"{key} is {_shown(given, key)} ({sources.of(key)}), but the run in {run_folder} was begun with "
            f"{_shown(was, key)}; a resumed run may change only {listed(FREE[:-2])}."
            + _eval_hint(key, _leaves(given), run_folder)
        )


def _eval_hint(key: str, leaves: Mapping[str, Any], run_folder: Path) -> str:
    """How to evaluate with another value of a key that all evaluations of a run share; empty for other keys."""
    if not key.startswith("evaluation.") or key.startswith(SHOWN_APART) or key not in leaves:
        return ""
    value = "null" if leaves[key] is None else show(leaves[key])
    return (
        " All evaluations of a run must be comparable, so they use the same settings. Leave the key out, and evaluate "
        f"with another value by `solrl eval {run_folder} --set {key}={value}`."
    )


def notes(given: Config, was: Config) -> list[str]:
    """Notes on allowed changes that may alter the last bits of results."""
    sentences = []
    encoded = [
        (bool(encoder_of(c.fleet).num_gpus), encoder_of(c.fleet).threads, encoding_batch(c.fleet)) for c in (given, was)
    ]
    if encoded[0] != encoded[1]:
        sentences.append(
            "fleet.encoders or fleet.placement now encodes prompts on another kind of device, with another number of "
            "threads or in another micro-batch. Embeddings may differ in their last bits, and so may all results."
        )
    return sentences + [
        f"{key} is {now} and was {before}: seeds stay the same, but sums are split differently, so the bytes may "
        "differ from an undisturbed run."
        for key in _SPLITS_SUMS
        if (now := given.value_of(key)) != (before := was.value_of(key))
    ]


def _leaves(config: Config) -> dict[str, object]:
    """Dotted key → value, for all keys that are not sections. A list of plain values counts as one value."""
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
    return show(leaves[key]) if key in leaves else "not set"
