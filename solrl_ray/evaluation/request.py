"""The request of a ``solrl eval``: its configuration, state, policies and folder."""

from __future__ import annotations

from itertools import chain, count
from pathlib import Path

from solrl_ray.config.loading import LoadedConfig, load_with_sources
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import UserError
from solrl_ray.evaluation.held_out import EVAL_POLICIES
from solrl_ray.learning.state import LearnerState
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.storage.checkpoints import newest_told
from solrl_ray.storage.continuation import first_difference
from solrl_ray.storage.run_folder import RunFolder


def evaluation_config(loaded: LoadedConfig, run_file: Path, rewards: list[Path], *, all_prompts: bool) -> LoadedConfig:
    """The run's configuration with the rewards of the files, if any, and no more pictures than prompts.

    Args:
        run_file: the run's own configuration.
        all_prompts: the user gave the prompts; all are used unless `evaluation.prompts` is set.

    Raises UserError: a rewards file sets anything else.
    """
    config, columns, sources = loaded.config, list[RewardConfig](), loaded.sources
    was = load_with_sources([run_file]).config
    for file in rewards:
        given = load_with_sources([run_file, file])
        key = first_difference(given.config, was, free=("rewards",))
        if key is not None:
            raise UserError(f"{file} sets {key}; a file of --rewards may set nothing but rewards, use --set for more.")
        for entry, reward in enumerate(given.config.rewards):
            sources = sources.with_entry("rewards", len(columns), given.sources, entry)
            columns.append(reward)
    evaluation = config.evaluation
    if all_prompts and loaded.sources.of("evaluation.prompts") != "--set":
        evaluation = evaluation.changed({"prompts": len(read_prompts(config.prompts.heldout, "--prompts"))})
    evaluation = evaluation.changed({"pictures": min(evaluation.pictures, evaluation.prompts), "reference": ""})
    config = config.changed({"rewards": columns or config.rewards, "evaluation": evaluation})
    return LoadedConfig(config, sources)


def policies_of(text: str) -> tuple[str, ...]:
    """The policies in a comma-separated list, without repetitions, in the order of `EVAL_POLICIES`. Raises `UserError`
    for unknown ones.
    """
    asked = {name.strip() for name in text.split(",")}
    if unknown := sorted(asked - set(EVAL_POLICIES)):
        raise UserError(f"--policies has {unknown[0]!r}; it must be a list of {', '.join(EVAL_POLICIES)}.")
    return tuple(name for name in EVAL_POLICIES if name in asked)


def state_of(run: Path, updates: int | None) -> LearnerState:
    """The state of a run after `updates` updates, or its newest one that verifies.

    Raises `UserError` if there is none.
    """
    there = RunFolder(run).checkpoints()
    if updates is not None:
        found = [path for number, path in there if number == updates]
        if not found:
            numbers = ", ".join(str(number) for number, _ in there) or "no checkpoint"
            raise UserError(f"--updates is {updates}, but {run} has {numbers}.")
        return LearnerState.load(found[0])
    state = newest_told(there, run)
    if state is None:
        raise UserError(
            f"{run} has no checkpoint yet, so it has no policy: the first is written after the first update; wait for "
            "it, or resume the run if it has stopped."
        )
    return state


def free_folder(run: Path, updates: int) -> Path:
    """``eval/updates-000020`` in the run folder, or with the next free number."""
    name = f"updates-{updates:06d}"
    folders = (run / "eval" / each for each in chain([name], (f"{name}-{number}" for number in count(2))))
    return next(folder for folder in folders if not folder.exists())
