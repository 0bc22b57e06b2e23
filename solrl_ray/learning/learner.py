"""One iteration's update of the policy, seen by one rank of the learner group.

    check groups ─► advantages ─► for each of `learner.updates` equal parts of the prompts:
                                        │
         for every micro-batch of this rank:
             passes of the objective ─► reference velocities (no gradient), all passes
             for every pass: v_theta ─► loss ─► backward
                                        │
         loss finite on all ranks? ─► one AdamW step ─► EMA ─┐
                                                             └─► decay of `old` ─► revision + 1

Everything random is addressed, the order of all sums is fixed, and what comes in are full-precision samples
with full-precision rewards only (`SampleGroup`): an update is a function of state and samples, at a given
world size and ZeRO stage.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from solrl_ray import objectives
from solrl_ray.config.checks import needs_trajectory
from solrl_ray.config.objectives import Awm
from solrl_ray.config.samplers import Ode
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.learning.batches import check_groups, equal_parts, fingerprint, rank_batches, rewards_and_groups
from solrl_ray.learning.engine import MOMENTS, Engine
from solrl_ray.learning.state import LearnerState
from solrl_ray.models import attention
from solrl_ray.models.base import DiffusionModel
from solrl_ray.objectives.advantages import advantages as group_advantages
from solrl_ray.objectives.base import Loss, MicroBatch, Pass, Reference, Velocities
from solrl_ray.objectives.schedules import anchor_decay, ema_decay, old_decay
from solrl_ray.policy import adapters
from solrl_ray.policy.ema import Ema
from solrl_ray.records import PromptEmbedding, SampleGroup
from solrl_ray.sampling.schedules import sigmas


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics:
    """What one iteration's update did. Losses are means over samples and passes, over all ranks and optimiser
    steps."""

    iteration: int
    revision: int
    """Revision of `old` after the update."""
    loss: float
    policy_loss: float
    kl: float
    """Divergence from the reference, before its weight in the loss."""
    gradient_norm: float
    """Global L2 norm before clipping, mean over optimiser steps."""
    samples: int
    passes: int
    """Forward and backward passes of this rank."""
    seconds: float
    advantage_std: float
    """Population standard deviation over the samples; group means are 0."""
    advantage_max: float
    """Largest magnitude, before clipping."""
    advantage_clipped: float
    """Share of samples beyond the clip."""
    ratio_mean: float | None = None
    """Mean ratio of probabilities under trained and sampling policy; None if the objective has none."""
    ratio_deviation: float | None = None
    """Largest abs(ratio - 1)."""
    first_ratio_deviation: float | None = None
    """The same in the first optimiser step; 0 is expected where the sampling policy is a copy of the trained one."""
    clip_fraction: float | None = None
    """Share of samples and passes whose ratio was outside of the clip range."""


@dataclass(slots=True)
class _Sums:
    """What a rank adds up over the passes of one optimiser step."""

    shares: torch.Tensor
    """This rank's share of the means of (total, policy, kl, ratio, clipped) over all ranks, float64 [5]."""
    deviation: torch.Tensor
    """Largest abs(ratio - 1) of any pass, float64 []."""
    has_ratio: bool = False
    passes: int = 0

    @classmethod
    def zero(cls, device: torch.device) -> _Sums:
        zeros = torch.zeros(6, dtype=torch.float64, device=device)
        return cls(shares=zeros[:5], deviation=zeros[5])

    def add(self, loss: Loss, weights: torch.Tensor, scale: float) -> None:
        self.passes += 1
        self.has_ratio = loss.ratio is not None
        nothing = torch.zeros_like(loss.kl)
        ratio = nothing if loss.ratio is None else loss.ratio
        clipped = nothing if loss.clipped is None else loss.clipped
        parts = torch.stack([loss.total.detach(), loss.policy.detach(), loss.kl.detach(), ratio, clipped])
        self.shares += (parts.double() * weights).sum(dim=1) * scale
        if loss.ratio is not None:
            self.deviation = torch.maximum(self.deviation, ((ratio.double() - 1).abs() * weights).max())


class Learner:
    """Trains ``default`` and keeps ``old`` (the sampling policy) and the EMA beside it.

    The process group must have been joined (`engine.process_group`). `update` and `state` are collective:
    every rank calls them, `update` with equal arguments.
    """

    def __init__(self, config: Config, model: DiffusionModel, rank: int, world_size: int) -> None:
        """Attach the adapters to `model.transformer` at revision 0.

        Raises:
            RunError: the process group was not joined, or as another rank.
        """
        if not torch.distributed.is_initialized():
            raise RunError("the learner's process group was not joined")
        joined = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if joined != (rank, world_size):
            raise RunError(f"learner {rank} of {world_size} joined its group as {joined[0]} of {joined[1]}")
        self._config, self._model = config, model
        self._rank, self._world_size = rank, world_size
        self._updates = self._steps = 0
        self._failed = False
        attention.choose_for_training()
        steps, sampler = config.rollout.full.steps, config.rollout.sampler
        self._objective = objectives.load(config, sigmas(config.model.schedule, steps, model.image_tokens))
        self._transitions = 0 if isinstance(sampler, Ode) or not needs_trajectory(config) else sampler.recorded(steps)
        if config.learner.gradient_checkpointing:
            model.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
        self._anchored = "anchor" in self._objective.references
        adapters.attach(model.transformer, config.model.lora, config.run.seed, anchor=self._anchored)
        self._parameters = adapters.parameters(model.transformer, "default")
        self._ema = Ema(adapters.factors(model.transformer, "default"))
        self._engine = Engine.build(config.learner, list(self._parameters.values()), self._velocity)

    @property
    def revision(self) -> int:
        """Revision of `old`: the policy whose samples the next update takes."""
        return self._updates

    def update(
        self, iteration: int, groups: Sequence[SampleGroup], embeddings: Mapping[str, PromptEmbedding]
    ) -> UpdateMetrics:
        """The optimiser steps of an iteration, all samples once, each followed by the EMA's; then the sampling
        policy's.

        Args:
            groups: every group of the iteration, in prompt order, drawn by revision `self.revision`.
            embeddings: by prompt id.

        Raises:
            RunError: a group that must not be learned from (`batches.check_groups`), ranks that were given
                different groups, or a loss or gradient that is not finite. The step in question has changed no
                weight then; a learner whose update failed half-way takes no further one.
        """
        started = time.perf_counter()
        if self._failed:
            raise RunError("this learner's last update failed half-way; build a new one from the last state")
        self._check(iteration, groups, embeddings)
        rewards, positions = rewards_and_groups(groups)
        advantages = group_advantages(rewards, positions, self._config.objective.advantage)
        self._failed = True
        done = [
            self._step(iteration, [groups[i] for i in part], advantages[np.isin(positions, part)], embeddings)
            for part in equal_parts(groups, self._config.learner.updates)
        ]
        self._follow()
        self._failed = False
        return self._metrics(iteration, done, advantages, started)

    def _step(
        self,
        iteration: int,
        groups: Sequence[SampleGroup],
        advantages: NDArray[np.float64],
        embeddings: Mapping[str, PromptEmbedding],
    ) -> tuple[_Sums, float]:
        """One optimiser step: sums over all ranks and the gradient norm."""
        batches = rank_batches(
            groups,
            advantages,
            micro_batch=self._config.learner.micro_batch,
            rank=self._rank,
            world_size=self._world_size,
        )
        sums = self._accumulate(iteration, batches, embeddings, samples=len(advantages))
        torch.distributed.all_reduce(sums.shares)
        torch.distributed.all_reduce(sums.deviation, op=torch.distributed.ReduceOp.MAX)
        loss = float(sums.shares[0])
        if not math.isfinite(loss):
            raise RunError(f"the loss of iteration {iteration} is {loss}: the update was not made")
        gradient_norm = self._engine.step()
        self._steps += 1
        self._ema.update(self._parameters, ema_decay(self._steps, self._config.learner.ema_cap))
        if self._anchored and isinstance(self._config.objective, Awm):
            decay = anchor_decay(self._config.objective.anchor, self._steps)
            adapters.decay_(self._model.transformer, decay, "anchor")
        return sums, gradient_norm

    def _metrics(
        self,
        iteration: int,
        done: Sequence[tuple[_Sums, float]],
        advantages: NDArray[np.float64],
        started: float,
    ) -> UpdateMetrics:
        loss, policy_loss, kl, ratio, clipped = (
            math.fsum(float(sums.shares[i]) for sums, _ in done) / len(done) for i in range(5)
        )
        deviations = [float(sums.deviation) for sums, _ in done]
        has_ratio = done[0][0].has_ratio
        return UpdateMetrics(
            iteration=iteration,
            revision=self.revision,
            loss=loss,
            policy_loss=policy_loss,
            kl=kl,
            gradient_norm=math.fsum(norm for _, norm in done) / len(done),
            samples=len(advantages),
            passes=sum(sums.passes for sums, _ in done),
            seconds=time.perf_counter() - started,
            advantage_std=float(np.std(advantages)),
            advantage_max=float(np.max(np.abs(advantages))),
            advantage_clipped=float(np.mean(np.abs(advantages) > self._config.objective.advantage.clip)),
            ratio_mean=ratio if has_ratio else None,
            ratio_deviation=max(deviations) if has_ratio else None,
            first_ratio_deviation=deviations[0] if has_ratio else None,
            clip_fraction=clipped if has_ratio else None,
        )

    def _check(self, iteration: int, groups: Sequence[SampleGroup], embeddings: Mapping[str, PromptEmbedding]) -> None:
        """Raises RunError for what must not be learned from, before anything has been computed."""
        check_groups(
            groups,
            iteration=iteration,
            revision=self.revision,
            latent_shape=self._model.latent_shape,
            transitions=self._transitions,
        )
        missing = sorted({group.prompt_id for group in groups} - embeddings.keys())
        if missing:
            raise RunError(f"iteration {iteration} has no embedding of prompt {missing[0]}")
        self._check_ranks_agree(fingerprint(groups))

    def _accumulate(
        self,
        iteration: int,
        batches: Sequence[MicroBatch],
        embeddings: Mapping[str, PromptEmbedding],
        *,
        samples: int,
    ) -> _Sums:
        """All forward and backward passes of this rank over its samples."""
        old_is_default = self._old_is_default()
        sums = _Sums.zero(self._model.device)
        for batch in batches:
            embedding = self._model.batch_embeddings([embeddings[p] for p in batch.prompt_ids])
            passes = self._objective.passes(batch, self._model.device, iteration)
            # Without gradient, for all passes first: never between a forward and its backward, and one change of
            # adapters instead of one a pass.
            references = self._references(passes, embedding, old_is_default=old_is_default)
            adapters.use(self._model.transformer, "default")
            advantages = batch.advantages.to(self._model.device)
            weights = batch.weights.to(self._model.device)
            scale = 1.0 / (samples * len(passes))
            for k, one in enumerate(passes):
                v_theta = self._engine.velocity(one.x_t, one.t, embedding)
                # The ratio of an unchanged policy is exactly 1.
                old = {"old": v_theta.detach()} if old_is_default else {}
                given = {name: v[k] for name, v in references.items()}
                loss = self._objective.loss(one, Velocities(theta=v_theta, **old, **given), advantages)
                sums.add(loss, weights, scale)
                last = sums.passes == len(batches) * len(passes)
                # DeepSpeed averages over ranks; what is wanted is the mean over the samples of all ranks.
                self._engine.backward((loss.total * weights).sum() * (scale * self._world_size), last=last)
        return sums

    def _references(
        self, passes: Sequence[Pass], embedding: dict[str, torch.Tensor], *, old_is_default: bool
    ) -> dict[str, list[torch.Tensor]]:
        """Velocities of each pass under the policies that the objective compares with; `old` only if it differs."""
        wanted: tuple[Reference, ...] = self._objective.references
        if not old_is_default:
            wanted = (*wanted, "old")
        found: dict[str, list[torch.Tensor]] = {}
        with torch.no_grad():
            for name in wanted:
                adapters.use(self._model.transformer, name)
                found[name] = [self._velocity(one.x_t, one.t, embedding) for one in passes]
        return found

    def _velocity(self, x_t: torch.Tensor, t: torch.Tensor, embedding: dict[str, torch.Tensor]) -> torch.Tensor:
        """The model's velocity, float32; a bfloat16 base computes with the float32 factors under autocast."""
        bfloat16 = self._config.model.dtype == "bfloat16"
        with torch.autocast(self._model.device.type, dtype=torch.bfloat16, enabled=bfloat16):
            return self._model.velocity(x_t, t, embedding)

    def _old_is_default(self) -> bool:
        """Whether v_old would repeat v_theta bit for bit: before the first update, and after a decay of 0.

        What holds at the start of an optimiser step holds for all its passes.
        """
        old = adapters.parameters(self._model.transformer, "old")
        # One answer for all factors: asking for each would wait for the GPU hundreds of times.
        differs = torch.stack([torch.ne(value, old[name]).any() for name, value in self._parameters.items()])
        return not bool(differs.any())

    def _check_ranks_agree(self, value: int) -> None:
        extremes = torch.tensor([value, -value], dtype=torch.int64, device=self._model.device)
        torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
        highest, lowest = int(extremes[0]), -int(extremes[1])
        if highest != lowest:
            raise RunError("the ranks of the learner group were given different samples")

    def _follow(self) -> None:
        """The sampling policy follows the trained one; the revision moves on."""
        self._updates += 1
        adapters.decay_(self._model.transformer, old_decay(self._config.objective.old_decay, self._steps))

    def factors(self, name: Literal["default", "old", "ema", "base"]) -> dict[str, torch.Tensor]:
        """LoRA factors by name, float32 copies on the CPU; those of ``base`` have B = 0."""
        if name == "base":
            return adapters.base_factors(self.factors("default"))
        if name == "ema":
            return {key: value.cpu() for key, value in self._ema.factors.items()}
        return {key: value.cpu() for key, value in adapters.factors(self._model.transformer, name).items()}

    def state(self) -> LearnerState:
        """Everything the next update depends on. Collective: moments are gathered from all ranks."""
        moments = self._engine.moments()
        return LearnerState(
            updates=self._updates,
            steps=self._steps,
            anchor=self._anchor_factors(),
            default=self.factors("default"),
            old=self.factors("old"),
            ema=self.factors("ema"),
            **{key: dict(zip(self._parameters, moments[key], strict=True)) for key in MOMENTS},
        )

    def _anchor_factors(self) -> dict[str, torch.Tensor]:
        if not self._anchored:
            return {}
        return {key: value.cpu() for key, value in adapters.factors(self._model.transformer, "anchor").items()}

    def load(self, state: LearnerState) -> None:
        """Continue from `state`, whatever world size or ZeRO stage it was made at.

        Raises:
            UserError: it belongs to another model or LoRA configuration.
        """
        state.check_fits({name: p.shape for name, p in self._parameters.items()})
        adapters.load_factors(self._model.transformer, "default", state.default)
        adapters.load_factors(self._model.transformer, "old", state.old)
        self._ema = Ema({key: value.to(self._model.device) for key, value in state.ema.items()})
        moments = {key: [getattr(state, key)[name] for name in self._parameters] for key in MOMENTS}
        self._engine.restore(moments, state.steps)
        if self._anchored:  # a state of another objective has none: it starts at the trained policy, as at revision 0
            adapters.load_factors(self._model.transformer, "anchor", state.anchor or state.default)
        self._updates, self._steps = state.updates, state.steps

    def close(self) -> None:
        """Take DeepSpeed's hooks off the factors; the process group stays."""
        self._engine.close()
