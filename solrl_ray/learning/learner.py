"""One update of the policy, seen by one rank of the learner group.

    check groups ─► advantages ─► micro-batches of this rank
                                        │
         for every micro-batch, for every training timestep:
             noise, x_t ─► v_old, v_ref (no gradient) ─► v_theta ─► loss ─► backward
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
from numpy.typing import NDArray

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
from solrl_ray.learning.state import LearnerState
from solrl_ray.models.base import DiffusionModel
from solrl_ray.noise import initial_noise
from solrl_ray.objectives.advantages import advantages as group_advantages
from solrl_ray.objectives.nft import NftLoss, diffusion_nft_loss, noised
from solrl_ray.objectives.schedules import ema_decay, old_decay
from solrl_ray.objectives.timesteps import timesteps_for, training_noise_address
from solrl_ray.policy import adapters
from solrl_ray.policy.ema import Ema
from solrl_ray.records import Address, PromptEmbedding, SampleGroup
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
    """The weighted KL term as it enters the loss."""
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

    The process group must have been joined (`engine.process_group`). All methods are collective: every rank
    calls them with equal arguments.
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
        check_groups(
            groups, iteration=iteration, revision=self.revision, latent_shape=self._model.latent_shape
        )
        self._check_ranks_agree(fingerprint(groups))
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
        sums, passes = self._accumulate(iteration, batches, embeddings, samples=len(rewards))
        loss, policy_loss, kl = self._all_ranks_mean(sums)
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

    def _accumulate(
        self,
        iteration: int,
        batches: Sequence[MicroBatch],
        embeddings: Mapping[str, PromptEmbedding],
        *,
        samples: int,
    ) -> tuple[torch.Tensor, int]:
        """All forward and backward passes of this rank.

        Returns the float64 sums over its samples and timesteps of (total, policy, kl), already divided by the
        number of samples and timesteps of all ranks, and the number of passes.
        """
        old_is_default = self._old_is_default()
        steps = [self._timesteps(iteration, batch) for batch in batches]
        timesteps = steps[0].shape[1]
        # DeepSpeed averages over ranks; what is wanted is the mean over the samples of all ranks.
        share = 1.0 / (samples * timesteps)
        sums = torch.zeros(3, dtype=torch.float64, device=self._model.device)
        for i, batch in enumerate(batches):
            embedding = self._model.batch_embeddings([embeddings[p] for p in batch.prompt_ids])
            weights = batch.weights.to(self._model.device)
            for j in range(timesteps):
                loss = self._loss(iteration, batch, steps[i][:, j], embedding, old_is_default=old_is_default)
                last = i == len(batches) - 1 and j == timesteps - 1
                total = (loss.total * weights).sum() * share
                self._engine.backward(total * self._world_size, last=last)
                parts = torch.stack([loss.total.detach(), loss.policy.detach(), loss.kl.detach()])
                sums += (parts.double() * weights).sum(dim=1) * share
        return sums, len(batches) * timesteps

    def _loss(
        self,
        iteration: int,
        batch: MicroBatch,
        steps: NDArray[np.int64],
        embedding: dict[str, torch.Tensor],
        *,
        old_is_default: bool,
    ) -> NftLoss:
        """The objective of one pass: every sample at its own schedule step `steps` [B]."""
        objective = self._config.objective
        t = self._grid[torch.from_numpy(steps)].to(self._model.device)
        eps = initial_noise(self._noise_addresses(iteration, batch, steps), self._model.latent_shape)
        x0 = batch.x0.to(self._model.device)
        x_t = noised(x0, eps.to(self._model.device), t)
        # The passes without gradient come first: never between a forward and its backward.
        v_ref = self._without_gradient("base", x_t, t, embedding) if objective.kl != 0 else None
        v_old = None if old_is_default else self._without_gradient("old", x_t, t, embedding)
        adapters.use(self._model.transformer, "default")
        v_theta = self._engine.velocity(x_t, t, embedding)
        return diffusion_nft_loss(
            v_theta=v_theta,
            v_old=v_theta.detach() if v_old is None else v_old,
            v_ref=v_ref,
            x0=x0,
            x_t=x_t,
            t=t,
            advantages=batch.advantages.to(self._model.device),
            beta=objective.beta,
            kl=objective.kl,
            adv_clip=objective.advantage.clip,
        )

    def _timesteps(self, iteration: int, batch: MicroBatch) -> NDArray[np.int64]:
        """Schedule steps that the samples are trained on, in training order: [B, timesteps]."""
        return np.stack(
            [
                timesteps_for(
                    run_seed=self._config.run.seed,
                    iteration=iteration,
                    prompt_id=prompt_id,
                    index=index,
                    steps=len(self._grid),
                    fraction=self._config.objective.timestep_fraction,
                )
                for prompt_id, index in zip(batch.prompt_ids, batch.indices, strict=True)
            ]
        )

    def _noise_addresses(self, iteration: int, batch: MicroBatch, steps: NDArray[np.int64]) -> list[Address]:
        return [
            training_noise_address(
                run_seed=self._config.run.seed,
                iteration=iteration,
                prompt_id=prompt_id,
                index=index,
                step=int(step),
            )
            for prompt_id, index, step in zip(batch.prompt_ids, batch.indices, steps, strict=True)
        ]

    def _velocity(
        self, x_t: torch.Tensor, t: torch.Tensor, embedding: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """The model's velocity, float32; a bfloat16 base computes with the float32 factors under autocast."""
        bfloat16 = self._config.model.dtype == "bfloat16"
        with torch.autocast(self._model.device.type, dtype=torch.bfloat16, enabled=bfloat16):
            return self._model.velocity(x_t, t, embedding)

    def _without_gradient(
        self, adapter: adapters.Active, x_t: torch.Tensor, t: torch.Tensor, embedding: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        adapters.use(self._model.transformer, adapter)
        with torch.no_grad():
            return self._velocity(x_t, t, embedding)

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

    def _all_ranks_mean(self, shares: torch.Tensor) -> list[float]:
        torch.distributed.all_reduce(shares)
        return [float(value) for value in shares]

    def _advance(self) -> None:
        """EMA and sampling policy follow the trained one; the revision moves on."""
        self._updates += 1
        self._ema.update(self._parameters, ema_decay(self._updates, self._config.learner.ema_cap))
        adapters.decay_(self._model.transformer, old_decay(self._config.objective.old_decay, self._updates))

    def factors(self, name: Literal["default", "old", "ema"]) -> dict[str, torch.Tensor]:
        """LoRA factors by name, float32 copies on the CPU."""
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
        self._failed = False

    def close(self) -> None:
        """Take DeepSpeed's hooks off the factors; the process group stays."""
        self._engine.close()
