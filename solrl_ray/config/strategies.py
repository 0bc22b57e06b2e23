"""The rollout strategies: how a pool is sampled, and whether its samples are learned from; warnings about a run.

::

    direct      K of K   every sample is trained on          one stage, full precision
    scaled      K of N   the extremes of the pool            one stage, full precision
    quantized   K of N   the extremes, as they were drawn    one stage, low precision: breaks the first law
    two_stage   K of N   the extremes, sampled again         previews in low precision, then full precision
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from solrl_ray.config.pools import is_colocated, reserved
from solrl_ray.config.previews import Prune
from solrl_ray.config.reward_kinds import kind_of
from solrl_ray.config.schema import Config, Model
from solrl_ray.records import Pruning

_TIER_OF_DTYPE = {"float32": "float32", "bfloat16": "bf16"}
UNQUANTIZED_TIERS = tuple(_TIER_OF_DTYPE.values())
"""The models' own types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How workers sample."""

    tier: str
    steps: int
    """Solver steps."""
    micro_batch: int
    """Samples of one forward; the last one of a unit is padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSampling(Sampling):
    """How explorers sample the candidates of a pool."""

    pool: int
    unit: int
    """Candidates of one work unit; divides `pool`."""
    prune: Prune | None = None
    """As configured, for a whole pool; None if every candidate is sampled to the end."""

    @property
    def units(self) -> int:
        """Of one pool."""
        return self.pool // self.unit

    @property
    def kept(self) -> int:
        """Candidates of one pool that are sampled to the end."""
        return self.prune.keep if self.prune and self.prune.keep else self.pool

    @property
    def pruning(self) -> Pruning | None:
        """Of one unit."""
        if self.prune is None or self.prune.after is None:
            return None
        return Pruning(after=self.prune.after, keep=self.kept // self.units)

    @property
    def forwards(self) -> int:
        """Calls of the transformer for one unit, each on a micro-batch."""
        first = self._micro_batches(self.unit)
        if self.pruning is None:
            return first * self.steps
        return first * self.pruning.after + self._finishing * (self.steps - self.pruning.after)

    @property
    def decodings(self) -> int:
        """Micro-batches of one unit that are decoded and scored; in a pruned unit, all once and the kept ones again."""
        return self._micro_batches(self.unit) + self._finishing

    @property
    def padding(self) -> int:
        """Previews that fill up the last micro-batch of a pruned unit's second part and are discarded."""
        return self._finishing * self.micro_batch - self.pruning.keep if self.pruning else 0

    @property
    def _finishing(self) -> int:
        """Micro-batches of a pruned unit's second part."""
        return self._micro_batches(self.pruning.keep) if self.pruning else 0

    def _micro_batches(self, candidates: int) -> int:
        return math.ceil(candidates / self.micro_batch)


def full_tier(model: Model) -> str:
    """The tier that quantises nothing: the model's own type."""
    return _TIER_OF_DTYPE[model.dtype]


def describe_tier(config: Config, tier: str) -> str:
    """A tier, for a plan; for ``auto`` also the tier on the explorers' devices (`capability.resolve`)."""
    if tier != "auto":
        return tier
    if not config.fleet.explorers.num_gpus:
        return "auto: nvfp4-emulated on CPUs"
    return f"auto: nvfp4, else fp8, else {full_tier(config.model)}, as the card has it"


def is_one_stage(config: Config) -> bool:
    """Whether the pool's own samples are learned from. Without previews there is no rank fidelity either."""
    return config.rollout.strategy != "two_stage"


def pool_sampling(config: Config) -> PoolSampling:
    """Sampling of previews in two stages; of the samples themselves in one."""
    rollout, full = config.rollout, config.rollout.regenerate
    if not is_one_stage(config):
        return previews(config)
    tier = rollout.explore.precision if rollout.strategy == "quantized" else full_tier(config.model)
    return PoolSampling(
        tier=tier, steps=full.steps, micro_batch=full.micro_batch, pool=rollout.pool, unit=full.micro_batch
    )


def cannot_offload(config: Config) -> str:
    """Why no weights can leave a card while it explores (`fleet.offload`); empty if they can."""
    if not is_colocated(config.fleet):
        return "fleet.placement is split, where an explorer holds no layer twice"
    if not config.fleet.learners.num_gpus:
        return "fleet.learners.num_gpus is 0, so there is no card"
    if pool_sampling(config).tier in UNQUANTIZED_TIERS:
        return "the pool is sampled in full precision, so no layer has a quantised copy"
    return ""


def pool_unit_seconds(config: Config) -> float:
    """Deadline of a pool's unit, seconds: it grows with the unit."""
    deadlines, sampling = config.fleet.deadlines, pool_sampling(config)
    return deadlines.regenerate if is_one_stage(config) else deadlines.explore * sampling.unit / sampling.micro_batch


def previews(config: Config) -> PoolSampling:
    """Sampling of previews."""
    rollout, explore = config.rollout, config.rollout.explore
    prune = None if rollout.preview.prune == Prune() else rollout.preview.prune
    whole = rollout.pool if prune else explore.micro_batch
    return PoolSampling(
        tier=explore.precision,
        steps=explore.steps,
        micro_batch=explore.micro_batch,
        pool=rollout.pool,
        unit=rollout.preview.unit or whole,
        prune=prune,
    )


def reward_weights(config: Config) -> tuple[float, ...]:
    """Weights of rewards that have their own statistics before they are summed (`objectives.gdpo`); empty if not."""
    return tuple(reward.weight for reward in config.rewards) if config.objective.advantage.std == "gdpo" else ()


def unreproducible_rewards(config: Config) -> tuple[str, ...]:
    """Keys of the rewards that may score the same picture differently each time."""
    found = []
    for i, reward in enumerate(config.rewards):
        says = reward.reproducible
        if not (kind_of(reward).reproducible if says is None else says):
            found.append(f"rewards.{i} ({reward.kind})")
    return tuple(found)


def warnings(config: Config) -> tuple[str, ...]:
    """Warnings that readers of the run's results need; shown at its start, in its summary and its report."""
    said = []
    if config.rollout.strategy == "quantized":
        tier = config.rollout.explore.precision
        said.append(
            f"Trained on quantised samples: rollout.strategy quantized learns from the {tier} pictures and their "
            "rewards as they are. It is a baseline that is known to be bad; its results say nothing about the method."
        )
    fleet = config.fleet
    if pool_sampling(config).tier == "nvfp4-emulated" and fleet.explorers.num_gpus:
        said.append(
            "Slower than unquantised: rollout.explore.precision is nvfp4-emulated, which has NVFP4's numerics and none "
            "of its speed; GPUs are faster in nvfp4 or fp8."
        )
    if reserved(config, "num_gpus") and not config.run.deterministic:
        said.append(
            "Not reproducible to the bit: on GPUs kernels may be chosen by timing them, so digests can differ from run "
            "to run; with run.deterministic=true all give the same bits every time."
        )
    if rewards := unreproducible_rewards(config):
        said.append(
            f"Scores are not reproducible: {', '.join(rewards)} may score the same picture differently. A unit's "
            "first score counts; equal digests of equal runs are not promised."
        )
    return tuple(said)
