"""The update of an iteration whose samples still arrive, in prompt order.

Work is done as early as possible. Passes without gradient need only samples. A backward pass needs its samples'
advantages, which with `advantage.std: group` follow from the prompt's own rewards. Only the time differs: the passes,
the order in which gradients are added, and so every bit, are as if all samples had come at once.
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
    """Sums of a rank over the passes of one optimiser step."""

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
        """The same with its tensors on `device`, bit for bit."""
        references = {name: [v.to(device) for v in all_passes] for name, all_passes in self.references.items()}
        there: dict[int, torch.Tensor] = {}
        return replace(self, passes=[_moved(one, device, there) for one in self.passes], references=references)


def _moved(value: Any, device: torch.device | str, there: dict[int, torch.Tensor]) -> Any:
    """A dataclass of tensors and of such dataclasses; `there` keeps a shared tensor shared."""
    if isinstance(value, torch.Tensor):
        if id(value) not in there:
            there[id(value)] = value.to(device)
        return there[id(value)]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    return replace(value, **{f.name: _moved(getattr(value, f.name), device, there) for f in fields(value)})


@dataclass(slots=True)
class StepShare:
    """One optimiser step's share of the samples, on one rank."""

    samples: range
    """Positions of its samples on all ranks."""
    epoch: int
    """How often they were trained on before in this iteration."""
    slots: deque[Slots]
    """Micro-batches that are not prepared yet."""
    sums: Sums
    prepared: deque[Prepared] = field(default_factory=deque)
    """Micro-batches that wait for their advantages."""
    old_is_default: bool | None = None
    """Whether v_old repeats v_theta bit for bit; None before the step begins."""


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
            sizes: samples of each prompt, in prompt order.
            config: in how many equal parts of the prompts, of an optimiser step each, and how often all parts are
                trained on, in the same order.
            one_shape: whether samples of two prompts may share a micro-batch.
        """
        self.iteration, self.sizes = iteration, tuple(sizes)
        self.groups: list[SampleGroup] = []
        self.embeddings: dict[str, PromptEmbedding] = {}
        self.samples: list[tuple[SampleGroup, int]] = []
        """(group, position inside the group) of all samples so far, in sample order."""
        self.seconds = 0.0
        """Time spent on it."""
        self.parts = list[StepShare]()
        for epoch, part in product(range(config.epochs), equal_parts(self.sizes, config.updates)):
            cuts = cut(part, config.micro_batch, () if one_shape else self.sizes)
            slots = rank_slots(cuts, micro_batch=config.micro_batch, rank=rank, world_size=world_size)
            self.parts.append(StepShare(part, epoch, deque(slots), Sums.zero(device)))

    def add(self, groups: Sequence[SampleGroup], embeddings: Mapping[str, PromptEmbedding]) -> None:
        """Take the next groups.

        Raises RunError: another number of samples than announced, a group too many, or no embedding.
        """
        for group in groups:
            place = len(self.groups)
            if place == len(self.sizes) or len(group.indices) != self.sizes[place]:
                wanted = self.sizes[place] if place < len(self.sizes) else "no"
                raise RunError(
                    f"iteration {self.iteration} was opened for {len(self.sizes)} prompts; number {place + 1}, "
                    f"{group.prompt_id}, comes with {len(group.indices)} samples, expected {wanted}"
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
        """Advantages that are known so far, in sample order, float64."""
        advantage, weights = config.objective.advantage, reward_weights(config)
        if not self.groups or (advantage.needs_all and not self.complete):
            return np.empty(0)
        own = [each for group in self.groups for each in group.components]
        return advantages(
            *rewards_and_groups(self.groups), advantage, components=np.array(own) if own else None, weights=weights
        )
