"""Relations between keys, which the schema cannot express. Pure; runs before anything starts.

Checks of files (prompts, model folders, disk space) are in `solrl_ray.cli.preflight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from solrl_ray.config import compiled_learner, preview_checks
from solrl_ray.config.contradictions import Problem, value_of
from solrl_ray.config.loading import Sources
from solrl_ray.config.objectives import AwmConfig, DanceGrpoConfig, FlowGrpoConfig, share_of
from solrl_ray.config.pools import is_colocated, key_of, needs_packed, pools
from solrl_ray.config.preview_checks import stochastic_preview
from solrl_ray.config.samplers import Ode
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import UNQUANTIZED_TIERS, cannot_offload, full_tier, is_one_stage, pool_sampling
from solrl_ray.errors import UserError


def _names(config: Config) -> Iterator[Problem]:
    name = config.run.name
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        yield Problem("run.name", "the name of one folder inside run.root")
    if not config.model.lora.targets or not all(config.model.lora.targets):
        yield Problem("model.lora.targets", "a list of module-name suffixes such as to_q")


def _rollout(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.keep > rollout.pool:
        yield Problem("rollout.keep", f"at most rollout.pool, which is {rollout.pool}")
    if rollout.keep % 2:
        yield Problem("rollout.keep", "even, because half of the kept seeds are the best and half the worst")
    micro_batch = "rollout.regenerate.micro_batch" if is_one_stage(config) else "rollout.explore.micro_batch"
    size = value_of(config, micro_batch)
    if rollout.pool % size:
        below = max((divisor for divisor in range(1, size) if rollout.pool % divisor == 0), default=1)
        yield Problem(micro_batch, f"a divisor of rollout.pool, which is {rollout.pool}, such as {below}")
    precision, full = rollout.explore.precision, full_tier(config.model)
    if precision in UNQUANTIZED_TIERS and precision != full:
        yield Problem(
            "rollout.explore.precision",
            f"a quantised tier such as nvfp4-emulated, or {full}, because model.dtype is {config.model.dtype}",
        )


def _objective(config: Config) -> Iterator[Problem]:
    objective, sampler, rollout = config.objective, config.rollout.sampler, config.rollout
    if needs_trajectory(config) and isinstance(sampler, Ode):
        yield Problem(
            "rollout.sampler.kind",
            f"one of flow_sde, dance_sde or cps, because objective.kind is {objective.kind}, whose ratios need the "
            "transitions of a stochastic sampler",
        )
    if isinstance(objective, AwmConfig):
        levels = share_of(rollout.regenerate.steps, objective.timestep_fraction) - objective.skip_first
        if objective.timesteps > levels:
            yield Problem(
                "objective.timesteps",
                f"at most {levels}, the steps of rollout.regenerate that objective.timestep_fraction leaves",
            )
    if rollout.prompts % config.learner.updates:
        yield Problem("learner.updates", f"a divisor of rollout.prompts, which is {rollout.prompts}")


def _sampler(config: Config) -> Iterator[Problem]:
    sampler, explore, regenerate = config.rollout.sampler, config.rollout.explore, config.rollout.regenerate
    if isinstance(sampler, Ode):
        return
    if regenerate.steps < 2:
        yield Problem("rollout.regenerate.steps", f"at least 2 with rollout.sampler.kind {sampler.kind}")
    if not is_one_stage(config):
        yield from stochastic_preview(config, "rollout.explore.steps", explore.steps)
    if sampler.window is not None:
        low, high = sampler.window.range
        if not low < high < regenerate.steps:
            yield Problem(
                "rollout.sampler.window.range",
                f"two rising numbers of at most {regenerate.steps - 1}, for the last of rollout.regenerate.steps stays "
                "without",
            )
        elif sampler.window.size > high - low:
            yield Problem("rollout.sampler.window.size", f"at most {high - low}, the length of its range")


def needs_trajectory(config: Config) -> bool:
    """Whether the objective learns from stored transitions, not from the clean latents alone."""
    return isinstance(config.objective, FlowGrpoConfig | DanceGrpoConfig)


def _strategy(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.strategy == "direct" and rollout.keep != rollout.pool:
        yield Problem(
            "rollout.keep",
            f"{rollout.pool}, as many as rollout.pool, because rollout.strategy direct trains on every seed",
        )
    if rollout.strategy == "quantized":
        if rollout.explore.precision in ("auto", *UNQUANTIZED_TIERS):
            yield Problem(
                "rollout.explore.precision",
                "a quantised tier such as nvfp4-emulated for rollout.strategy quantized; unquantised, that is scaled",
            )
        if not rollout.accept_quantized_training:
            yield Problem(
                "rollout.accept_quantized_training",
                "true for rollout.strategy quantized, which trains on low-precision samples: "
                "a baseline that is known to be bad",
            )


def staleness_problems(config: Config) -> Iterator[Problem]:
    """Why a run may not explore ahead, if it should."""
    if not config.rollout.max_staleness:
        return
    if is_one_stage(config):
        yield Problem(
            "rollout.max_staleness",
            f"0 with rollout.strategy {config.rollout.strategy}, whose samples are learned from: only previews may be "
            "of an older revision",
        )
    if is_colocated(config.fleet):
        yield Problem(
            "rollout.max_staleness",
            "0 with fleet.placement colocated: a card explores or learns, so there is no time in which it could run "
            "ahead",
        )
    if config.checkpoints.keep < 2:
        yield Problem(
            "checkpoints.keep",
            "at least 2 with rollout.max_staleness 1: a resumed run explores with the policy of the checkpoint before",
        )


def _rewards(config: Config) -> Iterator[Problem]:
    for position, reward in enumerate(config.rewards):
        module, colon, function = reward.kind.rpartition(":")
        if not reward.kind or (colon and not (module and function)) or reward.kind.endswith(".py"):
            right = "a registered reward, or a function as module:function or file.py:function"
            yield Problem(f"rewards.{position}.kind", right)
    if all(reward.weight == 0 for reward in config.rewards):
        yield Problem("rewards.0.weight", "other than 0 for at least one reward")


def _evaluation(config: Config) -> Iterator[Problem]:
    evaluation = config.evaluation
    if evaluation.pictures > evaluation.prompts:
        yield Problem("evaluation.pictures", f"at most evaluation.prompts, which is {evaluation.prompts}")
    if evaluation.reference and not all(evaluation.reference.rpartition(":")):
        yield Problem("evaluation.reference", "a function as module:function or file.py:function")


def _publish(config: Config) -> Iterator[Problem]:
    if config.publish.base != "pack":
        return
    if not needs_packed(config, config.fleet.explorers.count):
        yield Problem(
            "publish.base",
            "checkpoint, because with fleet.placement colocated every explorer is in a learner's process, which has "
            "the base: there is nobody to get a pack",
        )
    if config.publish.mode == "lora":
        yield Problem("publish.base", "checkpoint with publish.mode lora, whose explorers merge into their own base")
    if pool_sampling(config).tier in UNQUANTIZED_TIERS:
        yield Problem(
            "publish.base", "checkpoint, because the pool is sampled in full precision: there is nothing to pack"
        )


def _fleet(config: Config) -> Iterator[Problem]:
    if 0 < config.fleet.learners.num_gpus < 1:
        yield Problem(
            "fleet.learners.num_gpus",
            "1: a rank has a whole GPU, on which with fleet.placement colocated (and num_gpus 1 of explorers and "
            "regenerators) its process also explores and regenerates",
        )
    for role in ("explorers", "regenerators", "encoders", "learners"):
        gpus = value_of(config, f"fleet.{role}.num_gpus")
        if gpus > 1 and not float(gpus).is_integer():
            yield Problem(f"fleet.{role}.num_gpus", "a share of one GPU, at most 1, or a whole number of them")
    for name, pool in pools(config.fleet).items():
        if pool.fallback_labels and not pool.labels:
            key = f"{key_of(config.fleet, name)}.fallback_labels"
            yield Problem(key, "empty without labels beside it: any node is its first choice")
    if config.fleet.hedge != 0 and not config.fleet.hedge >= 1:
        yield Problem("fleet.hedge", "0, or at least 1: the medians after which a late unit is repeated")


def _other_explorers(config: Config) -> Iterator[Problem]:
    others = config.fleet.other_explorers
    names = [other.name for other in others]
    for number, other in enumerate(others):
        key = f"fleet.other_explorers.{number}"
        if not re.fullmatch("[a-z][a-z0-9]*", other.name) or names.index(other.name) < number:
            yield Problem(f"{key}.name", "lower-case letters and digits, a letter first, and unique")
        if not float(other.num_gpus).is_integer():
            yield Problem(f"{key}.num_gpus", "a whole number: other explorers share no GPU")
        left = config.rollout.prompts - sum(before.prompts for before in others[:number])
        if other.prompts >= left:
            yield Problem(
                f"{key}.prompts",
                f"less than {left}, the prompts of an iteration (rollout.prompts) that no entry before explores: "
                "fleet.explorers needs at least one",
            )


def _compile(config: Config) -> Iterator[Problem]:
    if config.run.deterministic and config.compile.mode != "default":
        yield Problem("compile.mode", "default with run.deterministic: other modes choose kernels by timing them")
    if config.learner.activation_memory not in (None, 0, 1) and not compiled_learner.is_compiled(config):
        why = "compile.learner is false" if config.compile.learner is False else "fleet.learners.num_gpus is 0"
        yield Problem(
            "learner.activation_memory",
            f"0 or 1, because {why}: a learner that is not compiled keeps every activation or computes all again",
        )


def _colocated(config: Config) -> Iterator[Problem]:
    fleet, reason = config.fleet, cannot_offload(config)
    if fleet.offload and reason:
        yield Problem("fleet.offload", f"false or null: {reason}")
    if not is_colocated(fleet):
        return
    gpus = fleet.learners.num_gpus
    if gpus > 1:
        yield Problem("fleet.learners.num_gpus", "0 or 1 with fleet.placement colocated: a process has one card")
    for role in ("explorers", "regenerators"):
        if value_of(config, f"fleet.{role}.num_gpus") != gpus:
            yield Problem(
                f"fleet.{role}.num_gpus",
                f"{gpus:g}, as fleet.learners.num_gpus, with fleet.placement colocated, where they share processes",
            )
    if config.publish.mode == "branch":
        yield Problem(
            "publish.mode",
            "packed or lora with fleet.placement colocated: a card's explorer quantises what its regenerator merges",
        )


_RULES = (
    _names,
    _rollout,
    preview_checks.units_and_pruning,
    preview_checks.selection,
    _strategy,
    staleness_problems,
    _sampler,
    _objective,
    preview_checks.audit,
    preview_checks.fallback,
    _rewards,
    _evaluation,
    _publish,
    _fleet,
    _other_explorers,
    _compile,
    _colocated,
)


def check(config: Config, sources: Sources | None = None) -> None:
    """Refuse a configuration that cannot be run.

    `sources` lets the message name a value's file. Raises UserError for the first broken rule.
    """
    for rules in _RULES:
        for problem in rules(config):
            raise UserError(problem.sentence(config, sources or Sources()))
