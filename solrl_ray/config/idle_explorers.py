"""Advice if an iteration has fewer units of previews than there are explorers: some would have nothing to do."""

from __future__ import annotations

from solrl_ray.config.checks import units_and_pruning
from solrl_ray.config.pools import explorer_pools, explorers_in_all, prompts_of
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage, pool_sampling


def advice(config: Config) -> str:
    """The sentence for a plan; empty if each explorer gets a unit.

    The configuration must have passed `checks.check`.
    """
    idle, sampling, rollout = _idle(config), pool_sampling(config), config.rollout
    if not idle:
        return ""
    explorers, better = explorers_in_all(config.fleet), _better_unit(config, idle)
    said = f"{idle} of {explorers} explorers have no work, because an iteration has {rollout.prompts * sampling.units} "
    said += f"units ({_key(config)} is {sampling.unit}); "
    if better is None:
        return f"{said}{explorers - idle} explorers are as fast"
    return f"{said}rollout.preview.unit={better} makes {rollout.prompts * rollout.pool // better}"


def _key(config: Config) -> str:
    """What fixes the size of a unit."""
    if is_one_stage(config):
        return "rollout.regenerate.micro_batch"
    cut = config.rollout.preview.unit is not None or pool_sampling(config).prune
    return "rollout.preview.unit" if cut else "rollout.explore.micro_batch"


def _better_unit(config: Config, idle: int) -> int | None:
    """The largest smaller unit with which no explorer is idle, or with which the fewest are; None if none is better."""
    if is_one_stage(config):
        return None
    size = config.rollout.explore.micro_batch
    found = {}
    for unit in range(size, pool_sampling(config).unit, size):
        changed = _with_unit(config, unit)
        if not any(units_and_pruning(changed)):
            found[unit] = _idle(changed)
    best = min(found, key=lambda unit: (found[unit], -unit), default=None)
    return None if best is None or found[best] == idle else best


def _idle(config: Config) -> int:
    """Explorers beyond the units that an iteration has for their kind."""
    units, prompts = pool_sampling(config).units, prompts_of(config)
    return sum(max(0, pool.count - prompts[name] * units) for name, pool in explorer_pools(config.fleet).items())


def _with_unit(config: Config, unit: int) -> Config:
    preview = config.rollout.preview.model_copy(update={"unit": unit})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"preview": preview})})
