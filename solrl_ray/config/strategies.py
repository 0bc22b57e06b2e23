"""The rollout strategies: how a prompt's pool is sampled, and whether its own samples are learned from.

::

    direct      K of K   every sample is trained on          one stage, full precision
    scaled      K of N   the extremes of the pool            one stage, full precision
    quantized   K of N   the extremes, as they were drawn    one stage, low precision: breaks the first law
    two_stage   K of N   the extremes, sampled again         previews in low precision, then full precision
"""

from __future__ import annotations

from dataclasses import dataclass

from solrl_ray.config.schema import Config, ExploreConfig, Model

_TIER_OF_DTYPE = {"float32": "float32", "bfloat16": "bf16"}
UNQUANTIZED_TIERS = tuple(_TIER_OF_DTYPE.values())
"""The models' own arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSampling:
    """How explorers sample the candidates of a pool."""

    tier: str
    steps: int
    """Solver steps."""
    micro_batch: int
    """Candidates of one work unit; divides the pool."""


def full_tier(model: Model) -> str:
    """The tier that quantises nothing: the model's own arithmetic."""
    return _TIER_OF_DTYPE[model.dtype]


def is_one_stage(config: Config) -> bool:
    """Whether the pool's own samples are learned from. Without previews there is no rank fidelity either."""
    return config.rollout.strategy != "two_stage"


def pool_sampling(config: Config) -> PoolSampling:
    """Previews if the chosen seeds are sampled again, else the samples themselves."""
    rollout = config.rollout
    if not is_one_stage(config):
        preview = rollout.explore
        return PoolSampling(tier=preview.precision, steps=preview.steps, micro_batch=preview.micro_batch)
    tier = rollout.explore.precision if rollout.strategy == "quantized" else full_tier(config.model)
    return PoolSampling(tier=tier, steps=rollout.regenerate.steps, micro_batch=rollout.regenerate.micro_batch)


def previews(config: Config) -> tuple[ExploreConfig, ...]:
    """How previews are drawn on each level of the fallback ladder: as configured first, then changed level by level."""
    drawn = [config.rollout.explore]
    for fallback_level in config.fidelity.fallback:
        drawn.append(drawn[-1].model_copy(update=fallback_level.model_dump(exclude_none=True)))
    return tuple(drawn)


def at_fallback_level(config: Config, fallback_level: int) -> Config:
    """The configuration as explorers of that fallback level are to know it."""
    rollout = config.rollout.model_copy(update={"explore": previews(config)[fallback_level]})
    return config.model_copy(update={"rollout": rollout})


def unreproducible_rewards(config: Config) -> tuple[str, ...]:
    """Keys of the rewards that may give the same picture another score another time."""
    found = []
    for i, reward in enumerate(config.rewards):
        says = reward.reproducible
        if not (reward.kind != "judge" if says is None else says):
            found.append(f"rewards.{i} ({reward.kind})")
    return tuple(found)


def hedge(config: Config) -> float:
    """After how many medians a late unit is done by a second worker as well; 0, never, if the two might score its
    pictures otherwise."""
    return 0.0 if unreproducible_rewards(config) else config.fleet.hedge


def warnings(config: Config) -> tuple[str, ...]:
    """What whoever reads the run's results must know first; shown at its start, in its summary and its report."""
    said = []
    if config.rollout.strategy == "quantized":
        tier = config.rollout.explore.precision
        said.append(
            f"Trained on quantised samples: rollout.strategy quantized learns from the {tier} pictures and their "
            "rewards as they are. It is a baseline that is known to be bad; no result of it stands for the method."
        )
    fleet = config.fleet
    workers = (fleet.explorers, *fleet.other_explorers, fleet.regenerators, fleet.learners)
    gpus = sum(worker.num_gpus for worker in workers)
    if gpus > 0 and not config.run.deterministic:
        said.append(
            "Not reproducible to the bit: on GPUs kernels may be chosen by timing them, so digests can differ from run "
            "to run; run.deterministic=true uses others."
        )
    if rewards := unreproducible_rewards(config):
        said.append(
            f"Scores may differ from time to time: {', '.join(rewards)} need not score a picture as before. A unit's "
            "first score counts, and late units are not given to a second worker (fleet.hedge is taken as 0); equal "
            "digests of equal runs are not promised."
        )
    return tuple(said)
