"""How noisy the gradient of an optimiser step is: the simple noise scale tr(Σ) / |G|² of McCandlish et al.
(arXiv 1812.06162, appendix A), where a *group* (a prompt's chosen samples) is one draw.

::

    round of micro-batches, over all ranks ─► ends with a group? ─► gradient since the last such round: one piece
    pieces of a step ─► their spread ─► noise of one group; their mean, less its own noise ─► signal

The gradient is accumulated anyway: pieces are copies of a sample of its elements, taken as it goes by. Nothing that is
trained reads them, so no bit of a result depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed

ELEMENTS = 2**18
"""At most about so many elements of the factors are sampled; a ratio of two sums over elements needs no more."""


class GradientSample:
    """Every n-th element of the factors' accumulated gradient, on this rank.

    Must be made before DeepSpeed hooks on to the factors: it reads a gradient before that takes it away.
    """

    def __init__(self, factors: Sequence[torch.nn.Parameter]) -> None:
        stride = math.ceil(sum(factor.numel() for factor in factors) / ELEMENTS)
        sizes = [math.ceil(factor.numel() / stride) for factor in factors]
        self._sum = torch.zeros(sum(sizes), device=factors[0].device)
        self._before = torch.zeros_like(self._sum)
        self.wanted = False
        """Whether a piece ends with the next backward."""
        self._hooks = [
            factor.register_post_accumulate_grad_hook(partial(self._take, stride=stride, into=into))
            for factor, into in zip(factors, self._sum.split(sizes), strict=True)
        ]

    def piece(self) -> torch.Tensor:
        """What was added since the last call, or since `begin`, float32 [elements]."""
        piece = self._sum - self._before
        self._before.copy_(self._sum)
        return piece

    def begin(self) -> None:
        """An optimiser step begins, with a gradient of 0."""
        self._sum.zero_()
        self._before.zero_()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _take(self, factor: torch.Tensor, *, stride: int, into: torch.Tensor) -> None:
        if factor.grad is not None and self.wanted:
            into.copy_(factor.grad.detach().reshape(-1)[::stride])


def ended_groups(part: range, sizes: Sequence[int], ends: Sequence[int]) -> list[int]:
    """For each round of micro-batches of an optimiser step: groups that a piece ending with it has; 0 if it ends inside
    a group.

    Args:
        part: positions of the step's samples.
        sizes: samples of each of the iteration's groups.
        ends: the position after the last sample of one micro-batch of every rank, round by round.
    """
    boundaries, end = {}, 0
    for number, size in enumerate(sizes, start=1):
        end += size
        boundaries[end] = number
    found, before = [], boundaries.get(part.start, 0)
    for end in ends:
        number = boundaries.get(end, 0)
        found.append(number - before if number else 0)
        before = number or before
    return found


def signal_and_noise(pieces: Sequence[tuple[int, torch.Tensor]], world_size: int) -> tuple[float, float] | None:
    """Squared norm of the true gradient, and trace of the covariance of one group's gradient, over sampled elements.
    Both are unbiased, so the first may be negative. None with fewer than two pieces of one size. Collective.

    `pieces`: (groups, this rank's part of their gradient) of an optimiser step. The step's gradient is the mean over
    ranks of the sum of pieces, and the mean over its groups.
    """
    sizes = [count for count, _ in pieces]
    size = max(set(sizes), key=sizes.count, default=0)
    alike = [piece for count, piece in pieces if count == size]
    if len(alike) < 2:
        return None
    stacked = torch.stack(alike)
    torch.distributed.all_reduce(stacked)
    means = stacked.double() * (sum(sizes) / size / world_size)
    mean = means.mean(dim=0)
    spread = float((means - mean).square().sum()) / (len(alike) - 1)
    return float(mean.square().sum()) - spread / len(alike), size * spread
