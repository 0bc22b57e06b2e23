"""Request of ``solrl eval``: configuration, state, policies and output folder."""

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
    """The configuration of the evaluation: the run's, with the rewards of the given files, without real images,
    and with images kept for no more prompts than are evaluated.

    Args:
        run_file: the configuration file of the run.
        rewards: files that replace the rewards of the run; empty: keep them.
        all_prompts: True if the user gave a prompt file. All its prompts are used unless `evaluation.prompts` is set.

    Raises UserError if a rewards file sets another key.
    """
    config, columns, sources = loaded.config, list[RewardConfig](), loaded.sources
    was = load_with_sources([run_file]).config
    for file in rewards:
        given = load_with_sources([run_file, file])
        key = first_difference(given.config, was, free=("rewards",))
        if key is not None:
            raise UserError(
                f"{file} sets {key}, but a file of --rewards may set only rewards. Use --set for other keys."
            )
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
    """Parse a comma-separated list of policies: without repetitions, in the order of `EVAL_POLICIES`.

    Raises `UserError` for unknown policies.
    """
    requested = {name.strip() for name in text.split(",")}
    if unknown := sorted(requested - set(EVAL_POLICIES)):
        raise UserError(f"--policies has {unknown[0]!r}, which is no policy. Choose from {', '.join(EVAL_POLICIES)}.")
    return tuple(name for name in EVAL_POLICIES if name in requested)


def state_of(run: Path, updates: int | None) -> LearnerState:
    """Load the state of a run after `updates` updates; None: its newest checkpoint that verifies.

    Raises `UserError` if the run has no such checkpoint.
    """
    checkpoints = RunFolder(run).checkpoints()
    if updates is not None:
        matching = [path for number, path in checkpoints if number == updates]
        if not matching:
            numbers = ", ".join(str(number) for number, _ in checkpoints)
            available = f"checkpoints only after {numbers} updates" if numbers else "no checkpoint yet"
            raise UserError(f"--updates is {updates}, but {run} has {available}.")
        return LearnerState.load(matching[0])
    state = newest_told(checkpoints, run)
    if state is None:
        raise UserError(
            f"{run} has no checkpoint to evaluate yet; the first one is written after the first update. "
            "Wait for it, or resume the run if it has stopped."
        )
    return state


def free_folder(run: Path, updates: int) -> Path:
    """The output folder ``eval/updates-000020`` in the run folder; if it exists, ``…-2``, ``…-3`` and so on."""
    name = f"updates-{updates:06d}"
    folders = (run / "eval" / candidate for candidate in chain([name], (f"{name}-{number}" for number in count(2))))
    return next(folder for folder in folders if not folder.exists())
