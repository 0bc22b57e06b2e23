"""An open update: the samples of its iteration are still arriving, in prompt order.

Passes run as early as possible. Passes without gradient need only samples. A backward pass also needs advantages; with
`advantage.std: group` these depend only on the rewards of one prompt. The passes and the order in which gradients are
added stay the same, so every bit is the same as if all samples had arrived at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from solrl_ray.config.schema import Config, LearnerConfig
from solrl_ray.config.strategies import reward_weights
from solrl_ray.errors import RunError
from solrl_ray.learning.batches import Slots, cut, equal_parts, rank_slots, rewards_and_groups
from solrl_ray.objectives.advantages import advantages
from solrl_ray.objectives.base import Loss, MicroBatch, Pass
from solrl_ray.records import PromptEmbedding, SampleGroup


@dataclass(slots=True)
class Sums:
    """Sums over the passes of one optimiser step, on one rank."""

    shares: torch.Tensor
    """This rank's share of the means of (total, policy, kl, ratio, clipped) over all ranks, float64 [5]."""
    deviation: torch.Tensor
    """Largest abs(ratio - 1) of any pass, float64 []."""
    has_ratio: bool = False
    has_clip: bool = False
    passes: int = 0

    @classmethod
    def zero(cls, device: torch.device) -> Sums:
        zeros = torch.zeros(6, dtype=torch.float64, device=device)
        return cls(shares=zeros[:5], deviation=zeros[5])

    def add(self, loss: Loss, weights: torch.Tensor, scale: float) -> None:
        self.passes += 1
        self.has_ratio, self.has_clip = loss.ratio is not None, loss.clipped is not None
        nothing = torch.zeros_like(loss.kl)
        ratio = nothing if loss.ratio is None else loss.ratio
        clipped = nothing if loss.clipped is None else loss.clipped
        parts = torch.stack([loss.total.detach(), loss.policy.detach(), loss.kl.detach(), ratio, clipped])
        self.shares += (parts.double() * weights).sum(dim=1) * scale
        if loss.ratio is not None:
            self.deviation = torch.maximum(self.deviation, ((ratio.double() - 1).abs() * weights).max())


@dataclass(frozen=True, slots=True)
class Prepared:
    """A micro-batch, ready for its forward with gradient."""

    slots: Slots
    batch: MicroBatch
    passes: Sequence[Pass]
    references: dict[str, list[torch.Tensor]]
    """Velocities of each pass under the objective's other policies."""

    def to(self, device: torch.device | str) -> Prepared:
        """A copy with its tensors on `device`, bit for bit."""
        references = {name: [v.to(device) for v in all_passes] for name, all_passes in self.references.items()}
        copies: dict[int, torch.Tensor] = {}
        return replace(self, passes=[_moved(one, device, copies) for one in self.passes], references=references)


def _moved(value: Any, device: torch.device | str, copies: dict[int, torch.Tensor]) -> Any:
    """A copy of a (nested) dataclass of tensors on `device`.

    `copies`: id of a tensor → its copy, so that shared tensors stay shared.
    """
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = value.to(device)
        return copies[id(value)]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    return replace(value, **{f.name: _moved(getattr(value, f.name), device, copies) for f in fields(value)})


@dataclass(slots=True)
class StepShare:
    """One optimiser step's share of the samples, on one rank."""

    samples: range
    """Positions of the step's samples, over all ranks."""
    epoch: int
    """Number of earlier trainings on these samples in this iteration."""
    slots: deque[Slots]
    """Micro-batches that are not prepared yet."""
    sums: Sums
    prepared: deque[Prepared] = field(default_factory=deque)
    """Micro-batches that wait for their advantages."""
    old_is_default: bool | None = None
    """Whether v_old equals v_theta bit for bit; None before the step begins."""


class OpenUpdate:
    def __init__(
        self,
        iteration: int,
        sizes: Sequence[int],
        config: LearnerConfig,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        one_shape: bool,
    ) -> None:
        """
        Args:
            sizes: number of samples of each prompt, in prompt order.
            config: `updates`: number of equal parts of the prompts, with one optimiser step each; `epochs`: number of
                trainings on all parts, in the same order; `micro_batch`.
            one_shape: whether samples of different prompts may share a micro-batch.
        """
        self.iteration, self.sizes = iteration, tuple(sizes)
        self.groups: list[SampleGroup] = []
        self.embeddings: dict[str, PromptEmbedding] = {}
        self.samples: list[tuple[SampleGroup, int]] = []
        """(group, position in the group) of all samples so far, in sample order."""
        self.seconds = 0.0
        """Time spent on this update."""
        self.parts = list[StepShare]()
        for epoch, part in product(range(config.epochs), equal_parts(self.sizes, config.updates)):
            cuts = cut(part, config.micro_batch, () if one_shape else self.sizes)
            slots = rank_slots(cuts, micro_batch=config.micro_batch, rank=rank, world_size=world_size)
            self.parts.append(StepShare(part, epoch, deque(slots), Sums.zero(device)))

    def add(self, groups: Sequence[SampleGroup], embeddings: Mapping[str, PromptEmbedding]) -> None:
        """Add the next groups.

        Raises RunError if a group has not the announced number of samples, there are too many groups, or an embedding
        is missing.
        """
        for group in groups:
            position = len(self.groups)
            if position == len(self.sizes) or len(group.indices) != self.sizes[position]:
                wanted = self.sizes[position] if position < len(self.sizes) else "no"
                raise RunError(
                    f"iteration {self.iteration} was opened for {len(self.sizes)} prompts; number {position + 1}, "
                    f"{group.prompt_id}, has {len(group.indices)} samples, expected {wanted}"
                )
            if group.prompt_id not in embeddings:
                raise RunError(f"iteration {self.iteration} has no embedding of prompt {group.prompt_id}")
            self.groups.append(group)
            self.embeddings[group.prompt_id] = embeddings[group.prompt_id]
            self.samples += [(group, k) for k in range(len(group.indices))]

    @property
    def complete(self) -> bool:
        return len(self.groups) == len(self.sizes)

    def advantages(self, config: Config) -> NDArray[np.float64]:
        """Advantages known so far, in sample order, float64."""
        advantage, weights = config.objective.advantage, reward_weights(config)
        if not self.groups or (advantage.needs_all and not self.complete):
            return np.empty(0)
        rows = [row for group in self.groups for row in group.components]
        return advantages(
            *rewards_and_groups(self.groups), advantage, components=np.array(rows) if rows else None, weights=weights
        )
