"""The rollout strategies: sampling of a pool, and whether its own samples are trained on; warnings about a run.

::

    direct      K of K   every sample is trained on          one stage, full precision
    scaled      K of N   best and worst of the pool          one stage, full precision
    quantized   K of N   best and worst, as sampled          one stage, low precision: breaks the first law
    two_stage   K of N   best and worst, regenerated         previews in low precision, then full precision
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
"""Tiers without quantisation: the data types of models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings of a worker."""

    tier: str
    steps: int
    """Solver steps."""
    micro_batch: int
    """Samples per forward. The last micro-batch of a unit is padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSampling(Sampling):
    """Sampling settings of an explorer for the candidates of a pool."""

    pool: int
    unit: int
    """Candidates per work unit; divides `pool`."""
    prune: Prune | None = None
    """Configured pruning of a whole pool; None if all candidates are sampled to the end."""

    @property
    def units(self) -> int:
        """Work units per pool."""
        return self.pool // self.unit

    @property
    def kept(self) -> int:
        """Candidates per pool that are sampled to the end."""
        return self.prune.keep if self.prune and self.prune.keep else self.pool

    @property
    def pruning(self) -> Pruning | None:
        """Pruning of one unit; None without pruning."""
        if self.prune is None or self.prune.after is None:
            return None
        return Pruning(after=self.prune.after, keep=self.kept // self.units)

    @property
    def forwards(self) -> int:
        """Transformer calls per unit, each on one micro-batch."""
        first = self._micro_batches(self.unit)
        if self.pruning is None:
            return first * self.steps
        return first * self.pruning.after + self._finishing * (self.steps - self.pruning.after)

    @property
    def decodings(self) -> int:
        """Decoded and scored micro-batches per unit. In a pruned unit all candidates are decoded once and the kept ones
        again.
        """
        return self._micro_batches(self.unit) + self._finishing

    @property
    def padding(self) -> int:
        """Padding previews in the last micro-batch of a pruned unit after pruning; they are discarded."""
        return self._finishing * self.micro_batch - self.pruning.keep if self.pruning else 0

    @property
    def _finishing(self) -> int:
        """Micro-batches of a pruned unit after pruning."""
        return self._micro_batches(self.pruning.keep) if self.pruning else 0

    def _micro_batches(self, candidates: int) -> int:
        return math.ceil(candidates / self.micro_batch)


def full_tier(model: Model) -> str:
    """The unquantised tier: the model's data type."""
    return _TIER_OF_DTYPE[model.dtype]


def describe_tier(config: Config, tier: str) -> str:
    """The name of a tier for a plan; for ``auto`` also the tier on the explorers' devices (`capability.resolve`)."""
    if tier != "auto":
        return tier
    if not config.fleet.explorers.num_gpus:
        return "auto: nvfp4-emulated on CPUs"
    return f"auto: nvfp4, else fp8, else {full_tier(config.model)}, whichever the GPU supports"


def is_one_stage(config: Config) -> bool:
    """Whether the pool's own samples are trained on. One-stage strategies have no previews and no rank fidelity."""
    return config.rollout.strategy != "two_stage"


def pool_sampling(config: Config) -> PoolSampling:
    """Sampling settings of a pool: of the previews with two stages, of the training samples with one stage."""
    rollout, full = config.rollout, config.rollout.regenerate
    if not is_one_stage(config):
        return previews(config)
    tier = rollout.explore.precision if rollout.strategy == "quantized" else full_tier(config.model)
    return PoolSampling(
        tier=tier, steps=full.steps, micro_batch=full.micro_batch, pool=rollout.pool, unit=full.micro_batch
    )


def cannot_offload(config: Config) -> str:
    """Reason why no weights can be offloaded during exploration (`fleet.offload`); empty if they can."""
    if not is_colocated(config.fleet):
        return "fleet.placement is split, so no process holds both a layer and its quantised copy"
    if not config.fleet.learners.num_gpus:
        return "fleet.learners.num_gpus is 0, so there is no GPU to offload from"
    if pool_sampling(config).tier in UNQUANTIZED_TIERS:
        return "the pool is sampled in full precision, so no layer has a quantised copy"
    return ""


def pool_unit_seconds(config: Config) -> float:
    """Deadline of a pool's unit, seconds; proportional to the unit's micro-batches."""
    deadlines, sampling = config.fleet.deadlines, pool_sampling(config)
    return deadlines.regenerate if is_one_stage(config) else deadlines.explore * sampling.unit / sampling.micro_batch


def previews(config: Config) -> PoolSampling:
    """Sampling settings of previews."""
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
    """Weights of rewards that are normalised separately before they are summed (`objectives.gdpo`); else empty."""
    return tuple(reward.weight for reward in config.rewards) if config.objective.advantage.std == "gdpo" else ()


def unreproducible_rewards(config: Config) -> tuple[str, ...]:
    """Keys of the rewards that may score the same image differently each time."""
    keys = []
    for i, reward in enumerate(config.rewards):
        given = reward.reproducible
        if not (kind_of(reward).reproducible if given is None else given):
            keys.append(f"rewards.{i} ({reward.kind})")
    return tuple(keys)


def warnings(config: Config) -> tuple[str, ...]:
    """Warnings for readers of the run's results, shown at its start, in its summary and in its report."""
    sentences = []
    if config.rollout.strategy == "quantized":
        tier = config.rollout.explore.precision
        sentences.append(
            f"Trained on quantised samples: rollout.strategy quantized trains directly on the {tier} samples and their "
            "rewards. It is a baseline that is known to be bad; its results say nothing about the method."
        )
    fleet = config.fleet
    if pool_sampling(config).tier == "nvfp4-emulated" and fleet.explorers.num_gpus:
        sentences.append(
            "Slower than unquantised: rollout.explore.precision is nvfp4-emulated, which has NVFP4's numerics but not "
            "its speed; on GPUs use nvfp4 or fp8."
        )
    if reserved(config, "num_gpus") and not config.run.deterministic:
        sentences.append(
            "Not reproducible to the bit: on GPUs kernels may be chosen by timing them, so digests can differ from run "
            "to run. Set run.deterministic=true to get the same bits every time."
        )
    if rewards := unreproducible_rewards(config):
        sentences.append(
            f"Scores are not reproducible: {', '.join(rewards)} may score the same image differently. A unit's "
            "first score counts, and equal runs may have different digests."
        )
    return tuple(sentences)
