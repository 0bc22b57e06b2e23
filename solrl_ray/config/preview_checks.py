"""Relations between keys of previews: units, pruning, audits and the fallback ladder. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from solrl_ray.config.contradictions import Problem
from solrl_ray.config.previews import Prune
from solrl_ray.config.samplers import Cps, Ode
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import UNQUANTIZED_TIERS, PoolSampling, full_tier, is_one_stage, previews

PRUNE = "rollout.preview.prune"
"""Key of how the previews of level 0 are pruned."""


def units_and_pruning(config: Config) -> Iterator[Problem]:
    """Problems of the unit of previews, and of pruning on each level of the fallback ladder."""
    rollout = config.rollout
    if is_one_stage(config):
        given = {"prune": previews(config)[0].prune, "unit": rollout.preview.unit}
        for name in (name for name, value in given.items() if value is not None):
            key, why = f"rollout.preview.{name}", f"rollout.strategy {rollout.strategy}, which has no previews"
            yield Problem(key, f"empty with {why}: {key}=null")
        return
    unit, size = rollout.preview.unit, rollout.explore.micro_batch
    if unit is not None and (rollout.pool % unit or unit % size):
        yield Problem(
            "rollout.preview.unit",
            f"a divisor of rollout.pool, which is {rollout.pool}, and a multiple of rollout.explore.micro_batch, which "
            f"is {size}: the whole pool, or an equal part of it",
        )
    first, *levels = previews(config)
    key = PRUNE
    yield from _pruning(config, key, first)
    for number, drawn in enumerate(levels):
        if config.fidelity.fallback[number].prune is not None:
            key = f"fidelity.fallback.{number}.prune"
        yield from _pruning(config, key, drawn)


def selection(config: Config) -> Iterator[Problem]:
    """Problems of a rule of selection other than best and worst."""
    rollout = config.rollout
    if rollout.selection == "best_worst":
        return
    if is_one_stage(config):
        yield Problem("rollout.selection", f"best_worst with rollout.strategy {rollout.strategy}")
    elif any(drawn.prune for drawn in previews(config)):
        yield Problem(
            "rollout.selection",
            f"best_worst with {PRUNE}, which finishes the best and worst previews alone; {PRUNE}=null finishes all",
        )


def _pruning(config: Config, key: str, drawn: PoolSampling) -> Iterator[Problem]:
    """Problems of how these previews are pruned."""
    rollout, prune = config.rollout, drawn.prune
    if prune is None:
        return
    finish_all = f"{key}={'null' if key == PRUNE else '{}'} finishes all previews"
    if prune.after is None or prune.after >= drawn.steps:
        steps = f"the steps of a preview{' (rollout.explore.steps)' if key == PRUNE else ''}"
        yield Problem(f"{key}.after", f"a whole number less than {drawn.steps}, {steps}; {finish_all}")
    elif prune.keep is None or prune.keep < rollout.keep:
        yield Problem(f"{key}.keep", f"at least rollout.keep, which is {rollout.keep}: those are chosen from them")
    elif prune.keep % 2:
        yield Problem(f"{key}.keep", "even, because half of the previews that go on are the best and half the worst")
    elif prune.keep >= rollout.pool:
        yield Problem(f"{key}.keep", f"less than rollout.pool, which is {rollout.pool}; {finish_all}")
    elif prune.keep % (2 * drawn.units):
        yield Problem(
            f"{key}.keep",
            f"a multiple of {2 * drawn.units}, so that each of the {drawn.units} units of a pool "
            "(rollout.preview.unit) keeps an equal, even share",
        )


def stochastic_preview(config: Config, key: str, steps: int) -> Iterator[Problem]:
    """Problems of a preview by a stochastic sampler with so many steps."""
    sampler, most = config.rollout.sampler, config.rollout.regenerate.steps
    if not isinstance(sampler, Ode) and steps > most:
        yield Problem(
            key,
            f"at most rollout.regenerate.steps, which is {most}: with a stochastic sampler a preview takes some of the "
            "full trajectory's noise levels",
        )
    if isinstance(sampler, Cps) and steps != most:
        yield Problem(
            key,
            f"equal to rollout.regenerate.steps, which is {most}: the noise of cps is no Brownian path, so fewer steps "
            "would lead elsewhere and could not rank",
        )


def audit(config: Config) -> Iterator[Problem]:
    """Problems of the audit, if there is one."""
    rollout, fidelity = config.rollout, config.fidelity
    if not fidelity.audit_prompts:
        return
    if is_one_stage(config):
        yield Problem(
            "fidelity.audit_prompts", f"0, because rollout.strategy {rollout.strategy} has no previews to audit"
        )
    if fidelity.audit_prompts > rollout.prompts:
        yield Problem("fidelity.audit_prompts", f"at most rollout.prompts, which is {rollout.prompts}")
    unselected, dropped = rollout.pool - rollout.keep, rollout.pool - previews(config)[0].kept
    if unselected < 2:
        yield Problem("fidelity.audit_prompts", f"0, because {unselected} of a pool's seeds stay unselected")
    elif not 2 <= fidelity.audit_seeds <= (dropped or unselected):
        which = f"{dropped} seeds of a pool that are dropped" if dropped else f"{unselected} seeds of a pool that stay"
        yield Problem(
            "fidelity.audit_seeds",
            f"at least 2, because pairs are compared, and at most the {which}{'' if dropped else ' unselected'}",
        )


def fallback(config: Config) -> Iterator[Problem]:
    """Problems of the fallback ladder."""
    fidelity, drawn = config.fidelity, previews(config)
    if fidelity.floor is None:
        if fidelity.fallback:
            yield Problem("fidelity.floor", "a number between -1 and 1, below which fidelity.fallback is climbed")
        return
    if is_one_stage(config):
        yield Problem("fidelity.floor", f"empty, because rollout.strategy {config.rollout.strategy} has no previews")
    if not fidelity.fallback:
        yield Problem("fidelity.fallback", "a list of at least one level, such as [{steps: 8}, {precision: bf16}]")
    for number, (before, after) in enumerate(pairwise(drawn)):
        yield from _fallback_level(config, f"fidelity.fallback.{number}", before, after)


_LEVELS = {"nvfp4": 0, "nvfp4-emulated": 0, "fp8": 1, "auto": 1, "bf16": 2, "float32": 2}
"""Order of precision; ``auto`` may become any quantised tier."""


def _fallback_level(config: Config, key: str, before: PoolSampling, after: PoolSampling) -> Iterator[Problem]:
    """Problems of a fallback level that changes previews from `before` to `after`."""
    rise = _LEVELS[after.tier] - _LEVELS[before.tier]
    full = full_tier(config.model)
    less_pruned = after.prune != before.prune and _is_less(after.prune, before.prune)
    if after == before:
        unless = "precision rises or less is pruned" if before.prune else "precision rises"
        yield Problem(f"{key}.steps", f"more than {before.steps}, unless {unless}: an empty level changes nothing")
    elif not _is_less(after.prune, before.prune):
        was = f"after {before.prune.after} steps to {before.prune.keep} seeds" if before.prune else "not at all"
        yield Problem(f"{key}.prune", f"later or with more seeds that go on, for previews before it are pruned {was}")
    elif after.tier in UNQUANTIZED_TIERS and after.tier != full:
        yield Problem(f"{key}.precision", f"a quantised tier, or {full}, because model.dtype is {config.model.dtype}")
    elif after.tier != before.tier and (rise <= 0 or after.tier == "auto"):
        yield Problem(f"{key}.precision", f"a higher tier than {before.tier}, which previews have before it")
    elif rise <= 0 and (after.steps < before.steps or (after.steps == before.steps and not less_pruned)):
        yield Problem(f"{key}.steps", f"more than {before.steps}, which previews have before it")
    yield from stochastic_preview(config, f"{key}.steps", after.steps)


def _is_less(prune: Prune | None, than: Prune | None) -> bool:
    """Whether pruning is at least as late, and keeps at least as many."""
    if prune is None or than is None:
        return prune is None
    return (prune.after or 0) >= (than.after or 0) and (prune.keep or 0) >= (than.keep or 0)
