"""Checks across keys, which the schema cannot express: contradicting keys are rejected before anything starts. Pure.

Checks of files (prompts, model folders, disk space) are in `solrl_ray.cli.preflight`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from solrl_ray.config import compiled_learner, reward_kinds
from solrl_ray.config.guidance import Cfg
from solrl_ray.config.loading import Sources
from solrl_ray.config.pools import is_colocated, pools
from solrl_ray.config.problems import show
from solrl_ray.config.samplers import STOCHASTIC, Ode
from solrl_ray.config.schema import Config
from solrl_ray.config.section import Section
from solrl_ray.config.selection_rules import RULES
from solrl_ray.config.strategies import (
    UNQUANTIZED_TIERS,
    PoolSampling,
    cannot_offload,
    full_tier,
    is_one_stage,
    previews,
)
from solrl_ray.errors import UserError

PRUNE = "rollout.preview.prune"
"""Key of the pruning of previews."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule: the key to change, and a description of its valid values."""

    key: str
    right: str

    def sentence(self, config: Config, sources: Sources) -> str:
        value = config.value_of(self.key)
        value = show(value.model_dump() if isinstance(value, Section) else value)
        return f"{self.key} is {value} ({sources.of(self.key)}); it must be {self.right}."


def _names(config: Config) -> Iterator[Problem]:
    name = config.run.name
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        yield Problem("run.name", "the name of one folder inside run.root")
    if not config.model.lora.targets or not all(config.model.lora.targets):
        yield Problem("model.lora.targets", "a list of module-name suffixes such as to_q")


def _guidance(config: Config) -> Iterator[Problem]:
    for key, cfg in {"model.cfg": config.model.cfg, "evaluation.cfg": config.evaluation.cfg}.items():
        if cfg is None:
            continue
        if cfg.interval[0] >= cfg.interval[1]:
            yield Problem(f"{key}.interval", "two rising noise levels from 0 to 1, such as [0.2, 0.8]")
        if not cfg.is_on and cfg != Cfg():
            yield Problem(f"{key}.scale", f"above 1 if {key} has a negative prompt or an interval: 1 means no guidance")


def _references(config: Config) -> Iterator[Problem]:
    if config.model.references and len(config.model.shapes) > 1:
        yield Problem(
            "model.resolution", "one shape with model.references: a reference image is encoded once, at that size"
        )


def _rollout(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.keep > rollout.pool:
        yield Problem("rollout.keep", f"at most rollout.pool, which is {rollout.pool}")
    if rollout.keep % 2:
        yield Problem("rollout.keep", "even, because half of the kept seeds are the best and half the worst")
    micro_batch = "rollout.regenerate.micro_batch" if is_one_stage(config) else "rollout.explore.micro_batch"
    size = config.value_of(micro_batch)
    if rollout.pool % size:
        divisor = _divisor(rollout.pool, size)
        yield Problem(micro_batch, f"a divisor of rollout.pool, which is {rollout.pool}, such as {divisor}")
    precision, full = rollout.explore.precision, full_tier(config.model)
    if precision in UNQUANTIZED_TIERS and precision != full:
        right = f"a quantised tier, or {full}, because model.dtype is {config.model.dtype}"
        yield Problem("rollout.explore.precision", right)


def _divisor(number: int, below: int) -> int:
    """The largest divisor of `number` below `below`, which is not a divisor itself."""
    return max(n for n in range(1, min(below, number + 1)) if number % n == 0)


def _objective(config: Config) -> Iterator[Problem]:
    objective, sampler, rollout = config.objective, config.rollout.sampler, config.rollout
    if objective.needs_trajectory and isinstance(sampler, Ode):
        yield Problem(
            "rollout.sampler.kind",
            f"one of {', '.join(STOCHASTIC)}, because objective.kind is {objective.kind}, whose ratios need the "
            "transitions of a stochastic sampler",
        )
    wrong_range = tuple(_step_range(config))
    yield from wrong_range
    for key, right in () if wrong_range else objective.problems(len(objective.trained(rollout.regenerate.steps))):
        yield Problem(f"objective.{key}", right)
    if config.learner.epochs > 1 and not objective.is_bounded:
        bound = "; objective.clip_range does" if "clip_range" in type(objective).model_fields else ""
        right = f"1: objective.kind {objective.kind} does not limit how far samples move the policy{bound}"
        yield Problem("learner.epochs", right)
    if rollout.prompts % config.learner.updates:
        divisor = _divisor(rollout.prompts, config.learner.updates)
        yield Problem("learner.updates", f"a divisor of rollout.prompts, which is {rollout.prompts}, such as {divisor}")
    schedule, total = config.learner.schedule, config.run.iterations * config.learner.optimizer_steps
    after_warmup = total - schedule.warmup
    if (schedule.decay == "none") != (schedule.steps == 0):
        right = "0 without learner.schedule.decay" if schedule.steps else "at least 1 with learner.schedule.decay"
        yield Problem("learner.schedule.steps", right)
    if after_warmup < 0:
        yield Problem("learner.schedule.warmup", f"at most {total}, the number of optimiser steps of the run")
    elif schedule.steps > after_warmup and schedule.decay != "inverse_sqrt":
        right = f"at most {after_warmup}, the optimiser steps after the warm-up; the run has {total}"
        yield Problem("learner.schedule.steps", right)


def _step_range(config: Config) -> Iterator[Problem]:
    objective, steps = config.objective, config.rollout.regenerate.steps
    if objective.step_range is None:
        return
    last, which = steps, "rollout.regenerate.steps"
    if objective.needs_trajectory:
        if getattr(config.rollout.sampler, "window", None) is not None:
            yield Problem("objective.step_range", "empty with rollout.sampler.window: the window's steps are trained")
            return
        last, which = steps - 1, f"{which} without the last"
    low, high = objective.step_range
    if not low < high <= last:
        yield Problem("objective.step_range", f"two rising numbers, at most {last}: {which}")


def _sampler(config: Config) -> Iterator[Problem]:
    sampler, explore, regenerate = config.rollout.sampler, config.rollout.explore, config.rollout.regenerate
    if isinstance(sampler, Ode):
        return
    if regenerate.steps < 2:
        yield Problem("rollout.regenerate.steps", f"at least 2 with rollout.sampler.kind {sampler.kind}")
    if not is_one_stage(config):
        yield from _stochastic_preview(config, "rollout.explore.steps", explore.steps)
    if sampler.window is not None:
        low, high = sampler.window.range
        if not low < high < regenerate.steps:
            right = (
                f"two rising numbers, at most {regenerate.steps - 1}: the last of rollout.regenerate.steps has no noise"
            )
            yield Problem("rollout.sampler.window.range", right)
        elif sampler.window.size > high - low:
            yield Problem("rollout.sampler.window.size", f"at most {high - low}, the length of its range")


def _strategy(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.strategy == "direct" and rollout.keep != rollout.pool:
        yield Problem("rollout.keep", f"{rollout.pool}, which is rollout.pool, with rollout.strategy direct")
    if rollout.strategy == "quantized":
        if rollout.explore.precision in ("auto", *UNQUANTIZED_TIERS):
            yield Problem("rollout.explore.precision", "a quantised tier with rollout.strategy quantized")
        if not rollout.accept_quantized_training:
            right = "true for rollout.strategy quantized, a baseline that is known to be bad"
            yield Problem("rollout.accept_quantized_training", right)


def _videos(config: Config) -> Iterator[Problem]:
    chosen, key = config.rollout.preview.latent_frames, "rollout.preview.latent_frames"
    if config.model.frames and config.evaluation.reference:
        yield Problem("evaluation.reference", "empty with model.frames: it draws images, not videos")
    if chosen is None:
        return
    if not config.model.frames:
        yield Problem(key, "null without model.frames: only videos have frames")
    if is_one_stage(config):
        yield Problem(key, f"null with rollout.strategy {config.rollout.strategy}, which has no previews")
    if not chosen or chosen != sorted(set(chosen)):
        yield Problem(key, "rising numbers of latent frames, such as [0, 1, 2]")
    elif len(chosen) == 1 and (video := [one.kind for one in config.rewards if reward_kinds.kind_of(one).videos]):
        yield Problem(key, f"null, or several latent frames, with {video[0]}: it scores videos, and one frame is none")


def staleness_problems(config: Config) -> Iterator[Problem]:
    """Reasons why the run cannot explore ahead; none if `rollout.max_staleness` is 0."""
    if not config.rollout.max_staleness:
        return
    if is_one_stage(config):
        right = f"0 with rollout.strategy {config.rollout.strategy}: only previews may use an older policy revision"
        yield Problem("rollout.max_staleness", right)
    if is_colocated(config.fleet):
        yield Problem("rollout.max_staleness", "0 with fleet.placement colocated: a GPU either explores or learns")
    if config.checkpoints.keep < 2:
        right = "at least 2 with rollout.max_staleness 1: a resumed run explores with the previous checkpoint"
        yield Problem("checkpoints.keep", right)


def _rewards(config: Config) -> Iterator[Problem]:
    for position, reward in enumerate(config.rewards):
        module, colon, function = reward.kind.rpartition(":")
        if not reward.kind or (colon and not (module and function)) or reward.kind.endswith(".py"):
            right = "a registered reward, or a function as module:function or file.py:function"
            yield Problem(f"rewards.{position}.kind", right)
    if all(reward.weight == 0 for reward in config.rewards):
        yield Problem("rewards.0.weight", "other than 0 for at least one reward")
    if not config.model.references:
        fields = {f"rewards.{i}": reward_kinds.needs_references(reward) for i, reward in enumerate(config.rewards)}
        for key in (f"{entry}.{field}" for entry, field in fields.items() if field):
            yield Problem(key, "one that needs no reference images, because model.references is 0")


def _evaluation(config: Config) -> Iterator[Problem]:
    evaluation = config.evaluation
    if config.run.on_collapse != "warn":
        if not 0 < evaluation.every < config.run.iterations:
            right = f"warn without evaluations during training, because evaluation.every is {evaluation.every}"
            yield Problem("run.on_collapse", f"{right} and run.iterations {config.run.iterations}")
        elif evaluation.prompts < 2:
            right = "warn with evaluation.prompts 1: the reward of a single prompt has no standard error"
            yield Problem("run.on_collapse", right)
    if evaluation.reference and not all(evaluation.reference.rpartition(":")):
        yield Problem("evaluation.reference", "a function as module:function or file.py:function")


def _fleet(config: Config) -> Iterator[Problem]:
    if 0 < config.fleet.learners.num_gpus < 1:
        right = "1: a rank needs a whole GPU; with fleet.placement colocated it also explores and regenerates on it"
        yield Problem("fleet.learners.num_gpus", right)
    for role in ("explorers", "regenerators", "encoders", "learners"):
        gpus = config.value_of(f"fleet.{role}.num_gpus")
        if gpus > 1 and not float(gpus).is_integer():
            yield Problem(f"fleet.{role}.num_gpus", "a fraction of one GPU, at most 1, or a whole number of GPUs")
    for name, pool in pools(config.fleet).items():
        if pool.fallback_labels and not pool.labels:
            yield Problem(
                f"fleet.{name}.fallback_labels", f"empty without fleet.{name}.labels: any node is already allowed"
            )


def _compile(config: Config) -> Iterator[Problem]:
    if config.run.deterministic and config.compile.mode != "default":
        yield Problem("compile.mode", "default with run.deterministic: other modes choose kernels by timing them")
    if config.learner.activation_memory not in (None, 0, 1) and not compiled_learner.is_compiled(config):
        why = "compile.learner is false" if config.compile.learner is False else "fleet.learners.num_gpus is 0"
        right = f"0 or 1, because {why}: other values need a compiled learner"
        yield Problem("learner.activation_memory", right)


def _colocated(config: Config) -> Iterator[Problem]:
    fleet, reason = config.fleet, cannot_offload(config)
    if fleet.offload and reason:
        yield Problem("fleet.offload", f"false or null: {reason}")
    if not is_colocated(fleet):
        return
    gpus = fleet.learners.num_gpus
    if gpus > 1:
        yield Problem("fleet.learners.num_gpus", "0 or 1 with fleet.placement colocated: a process has one GPU")
    for role in ("explorers", "regenerators"):
        if config.value_of(f"fleet.{role}.num_gpus") != gpus:
            right = f"{gpus:g}, as fleet.learners.num_gpus, with fleet.placement colocated: they share processes"
            yield Problem(f"fleet.{role}.num_gpus", right)


# Previews


def units_and_pruning(config: Config) -> Iterator[Problem]:
    """Problems of `rollout.preview`: the work unit and pruning."""
    rollout = config.rollout
    if is_one_stage(config):
        given = {"prune": previews(config).prune, "unit": rollout.preview.unit}
        for name in (name for name, value in given.items() if value is not None):
            key, why = f"rollout.preview.{name}", f"rollout.strategy {rollout.strategy}, which has no previews"
            yield Problem(key, f"empty with {why}: set {key}=null")
        return
    unit, size = rollout.preview.unit, rollout.explore.micro_batch
    if unit is not None and (rollout.pool % unit or unit % size):
        right = f"a divisor of rollout.pool, {rollout.pool}, and a multiple of rollout.explore.micro_batch, {size}"
        yield Problem("rollout.preview.unit", right)
    yield from _pruning(config, previews(config))


def _selection(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if RULES[rollout.selection].keeps_ends:
        return
    if is_one_stage(config):
        yield Problem("rollout.selection", f"best_worst with rollout.strategy {rollout.strategy}")
    elif previews(config).prune:
        yield Problem("rollout.selection", f"best_worst with {PRUNE}; or set {PRUNE}=null to finish all previews")


def _pruning(config: Config, drawn: PoolSampling) -> Iterator[Problem]:
    rollout, prune = config.rollout, drawn.prune
    if prune is None:
        return
    finish_all = f"or set {PRUNE}=null to finish all previews"
    if prune.after is None or prune.after >= drawn.steps:
        steps = "the steps of a preview (rollout.explore.steps)"
        yield Problem(f"{PRUNE}.after", f"a whole number less than {drawn.steps}, {steps}; {finish_all}")
    elif prune.keep is None or prune.keep < rollout.keep:
        right = f"at least rollout.keep, which is {rollout.keep}: the kept seeds are chosen from finished previews"
        yield Problem(f"{PRUNE}.keep", right)
    elif prune.keep % 2:
        yield Problem(f"{PRUNE}.keep", "even, because half of the finished previews are the best and half the worst")
    elif prune.keep >= rollout.pool:
        yield Problem(f"{PRUNE}.keep", f"less than rollout.pool, which is {rollout.pool}; {finish_all}")
    elif prune.keep % (2 * drawn.units):
        right = (
            f"a multiple of {2 * drawn.units}: each of {drawn.units} units (rollout.preview.unit) keeps an even number"
        )
        yield Problem(f"{PRUNE}.keep", right)


def _stochastic_preview(config: Config, key: str, steps: int) -> Iterator[Problem]:
    sampler, most = config.rollout.sampler, config.rollout.regenerate.steps
    if isinstance(sampler, Ode):
        return
    if steps > most:
        right = (
            f"at most rollout.regenerate.steps, which is {most}: a stochastic preview uses a subset of its noise levels"
        )
        yield Problem(key, right)
    if not sampler.ranks_with_fewer_steps and steps != most:
        right = f"rollout.regenerate.steps, which is {most}: with {sampler.kind}, fewer steps give other images, so"
        yield Problem(key, f"{right} previews cannot rank the seeds")


def _fidelity(config: Config) -> Iterator[Problem]:
    fidelity = config.fidelity
    if fidelity.floor is not None and is_one_stage(config):
        yield Problem("fidelity.floor", f"empty, because rollout.strategy {config.rollout.strategy} has no previews")
    if fidelity.floor is None and fidelity.on_low == "stop":
        yield Problem("fidelity.floor", "a number between -1 and 1, below which fidelity.on_low stops the run")


_RULES = (
    _names,
    _guidance,
    _references,
    _rollout,
    units_and_pruning,
    _selection,
    _strategy,
    staleness_problems,
    _videos,
    _sampler,
    _objective,
    _fidelity,
    _rewards,
    _evaluation,
    _fleet,
    _compile,
    _colocated,
)


def check(config: Config, sources: Sources | None = None) -> None:
    """Reject a configuration that cannot run. Raises UserError for the first broken rule.

    `sources`: Sources of the values, so that the message can name a value's file.
    """
    for rules in _RULES:
        for problem in rules(config):
            raise UserError(problem.sentence(config, sources or Sources()))
