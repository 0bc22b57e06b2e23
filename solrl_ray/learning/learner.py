"""One update of the policy, seen by one rank of the learner group.

    check groups ─► advantages ─► micro-batches of this rank
                                        │
         for every micro-batch:
             noise, x_t ─► v_old, v_ref (no gradient), all timesteps
             for every timestep: v_theta ─► loss ─► backward
                                        │
         loss finite on all ranks? ─► one AdamW step ─► EMA, decay of `old` ─► revision + 1

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

from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.learning.batches import (
    MicroBatch,
    check_groups,
    fingerprint,
    rank_batches,
    rewards_and_groups,
)
from solrl_ray.learning.engine import MOMENTS, Engine
from solrl_ray.learning.passes import Pass, passes_over
from solrl_ray.learning.state import LearnerState
from solrl_ray.models import attention
from solrl_ray.models.base import DiffusionModel
from solrl_ray.objectives.advantages import advantages as group_advantages
from solrl_ray.objectives.nft import NftLoss, diffusion_nft_loss
from solrl_ray.objectives.schedules import ema_decay, old_decay
from solrl_ray.policy import adapters
from solrl_ray.policy.ema import Ema
from solrl_ray.records import PromptEmbedding, SampleGroup
from solrl_ray.sampling.schedules import sigmas


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics:
    """What one update did. Losses are means over samples and timesteps, over all ranks."""

    iteration: int
    revision: int
    """Revision of `old` after the update."""
    loss: float
    policy_loss: float
    kl: float
    """MSE(v_theta, v_ref), before its weight in the loss."""
    gradient_norm: float
    """Global L2 norm before clipping."""
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
        self._updates = 0
        self._failed = False
        full = sigmas(config.model.schedule, config.rollout.full.steps, model.image_tokens)
        self._grid = full[:-1].to(torch.float32)
        attention.choose_for_training()
        if config.learner.gradient_checkpointing:
            model.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
        adapters.attach(model.transformer, config.model.lora, config.run.seed)
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
        """One optimiser step on all samples of an iteration, then the EMA's and the sampling policy's.

        Args:
            groups: every group of the iteration, in prompt order, drawn by revision `self.revision`.
            embeddings: by prompt id.

        Raises:
            RunError: a group that must not be learned from (`batches.check_groups`), ranks that were given
                different groups, or a loss or gradient that is not finite. No weight has changed then; a
                learner whose update failed half-way takes no further one.
        """
        started = time.perf_counter()
        if self._failed:
            raise RunError("this learner's last update failed half-way; build a new one from the last state")
        self._check(iteration, groups, embeddings)
        rewards, positions = rewards_and_groups(groups)
        advantages = group_advantages(rewards, positions, self._config.objective.advantage)
        batches = rank_batches(
            groups,
            advantages,
            micro_batch=self._config.learner.micro_batch,
            rank=self._rank,
            world_size=self._world_size,
        )
        self._failed = True
        shares, passes = self._accumulate(iteration, batches, embeddings, samples=len(rewards))
        loss, policy_loss, kl = self._sum_over_ranks(shares)
        if not math.isfinite(loss):
            raise RunError(f"the loss of iteration {iteration} is {loss}: the update was not made")
        gradient_norm = self._engine.step()
        self._advance()
        self._failed = False
        clip = self._config.objective.advantage.clip
        return UpdateMetrics(
            iteration=iteration,
            revision=self.revision,
            loss=loss,
            policy_loss=policy_loss,
            kl=kl,
            gradient_norm=gradient_norm,
            samples=len(rewards),
            passes=passes,
            seconds=time.perf_counter() - started,
            advantage_std=float(np.std(advantages)),
            advantage_max=float(np.max(np.abs(advantages))),
            advantage_clipped=float(np.mean(np.abs(advantages) > clip)),
        )

    def _check(self, iteration: int, groups: Sequence[SampleGroup], embeddings: Mapping[str, PromptEmbedding]) -> None:
        """Raises RunError for what must not be learned from, before anything has been computed."""
        check_groups(groups, iteration=iteration, revision=self.revision, latent_shape=self._model.latent_shape)
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
    ) -> tuple[torch.Tensor, int]:
        """All forward and backward passes of this rank over its samples.

        Returns this rank's share of the means over all ranks' `samples` and their timesteps of (total,
        policy, kl), float64 [3], and the number of passes.
        """
        old_is_default = self._old_is_default()
        shares = torch.zeros(3, dtype=torch.float64, device=self._model.device)
        count = 0
        for batch in batches:
            embedding = self._model.batch_embeddings([embeddings[p] for p in batch.prompt_ids])
            x0 = batch.x0.to(self._model.device)
            passes = self._passes(iteration, batch, x0)
            # Without gradient, for all timesteps first: never between a forward and its backward, and one
            # change of adapters instead of one a timestep.
            references = self._references(passes, embedding, old_is_default=old_is_default)
            adapters.use(self._model.transformer, "default")
            advantages = batch.advantages.to(self._model.device)
            weights = batch.weights.to(self._model.device)
            scale = 1.0 / (samples * len(passes))
            for one, (v_old, v_ref) in zip(passes, references, strict=True):
                v_theta = self._engine.velocity(one.x_t, one.t, embedding)
                loss = self._loss(v_theta, v_old, v_ref, x0, one, advantages)
                count += 1
                last = count == len(batches) * len(passes)
                # DeepSpeed averages over ranks; what is wanted is the mean over the samples of all ranks.
                self._engine.backward((loss.total * weights).sum() * (scale * self._world_size), last=last)
                parts = torch.stack([loss.total.detach(), loss.policy.detach(), loss.kl.detach()])
                shares += (parts.double() * weights).sum(dim=1) * scale
        return shares, count

    def _passes(self, iteration: int, batch: MicroBatch, x0: torch.Tensor) -> list[Pass]:
        return passes_over(
            batch,
            x0,
            grid=self._grid,
            fraction=self._config.objective.timestep_fraction,
            run_seed=self._config.run.seed,
            iteration=iteration,
        )

    def _references(
        self, passes: Sequence[Pass], embedding: dict[str, torch.Tensor], *, old_is_default: bool
    ) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """(v_old, v_ref) of each pass; None where v_theta serves or nothing is needed."""
        v_old: list[torch.Tensor | None] = [None] * len(passes)
        v_ref: list[torch.Tensor | None] = [None] * len(passes)
        with torch.no_grad():
            if self._config.objective.kl != 0:
                adapters.use(self._model.transformer, "base")
                v_ref = [self._velocity(one.x_t, one.t, embedding) for one in passes]
            if not old_is_default:
                adapters.use(self._model.transformer, "old")
                v_old = [self._velocity(one.x_t, one.t, embedding) for one in passes]
        return list(zip(v_old, v_ref, strict=True))

    def _loss(
        self,
        v_theta: torch.Tensor,
        v_old: torch.Tensor | None,
        v_ref: torch.Tensor | None,
        x0: torch.Tensor,
        one: Pass,
        advantages: torch.Tensor,
    ) -> NftLoss:
        objective = self._config.objective
        return diffusion_nft_loss(
            v_theta=v_theta,
            v_old=v_theta.detach() if v_old is None else v_old,
            v_ref=v_ref,
            x0=x0,
            x_t=one.x_t,
            t=one.t,
            advantages=advantages,
            beta=objective.beta,
            kl=objective.kl,
            adv_clip=objective.advantage.clip,
        )

    def _velocity(self, x_t: torch.Tensor, t: torch.Tensor, embedding: dict[str, torch.Tensor]) -> torch.Tensor:
        """The model's velocity, float32; a bfloat16 base computes with the float32 factors under autocast."""
        bfloat16 = self._config.model.dtype == "bfloat16"
        with torch.autocast(self._model.device.type, dtype=torch.bfloat16, enabled=bfloat16):
            return self._model.velocity(x_t, t, embedding)

    def _old_is_default(self) -> bool:
        """Whether v_old would repeat v_theta bit for bit: before the first update, and after a decay of 0.

        There is one optimiser step per iteration, so what holds at its start holds for all its passes.
        """
        old = adapters.parameters(self._model.transformer, "old")
        return all(torch.equal(value, old[name]) for name, value in self._parameters.items())

    def _check_ranks_agree(self, value: int) -> None:
        extremes = torch.tensor([value, -value], dtype=torch.int64, device=self._model.device)
        torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
        highest, lowest = int(extremes[0]), -int(extremes[1])
        if highest != lowest:
            raise RunError("the ranks of the learner group were given different samples")

    def _sum_over_ranks(self, shares: torch.Tensor) -> list[float]:
        torch.distributed.all_reduce(shares)
        return [float(value) for value in shares]

    def _advance(self) -> None:
        """EMA and sampling policy follow the trained one; the revision moves on."""
        self._updates += 1
        self._ema.update(self._parameters, ema_decay(self._updates, self._config.learner.ema_cap))
        adapters.decay_(self._model.transformer, old_decay(self._config.objective.old_decay, self._updates))

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
            default=self.factors("default"),
            old=self.factors("old"),
            ema=self.factors("ema"),
            **{key: dict(zip(self._parameters, moments[key], strict=True)) for key in MOMENTS},
        )

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
        self._engine.restore(moments, state.updates)
        self._updates = state.updates

    def close(self) -> None:
        """Take DeepSpeed's hooks off the factors; the process group stays."""
        self._engine.close()
