"""An autoencoder whose decoder is left early: its first up-blocks, then a read-out of their features to pixels.

The read-out is a convolution that least squares fit to what the whole decoder makes of the same latents, downscaled. So
it needs no gradients, no checkpoint and no pictures.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from diffusers import AutoencoderDC
from torch import Tensor, nn

Where = Literal["entry", "end"]
RIDGE = 1e-6
"""Of the mean square of a feature: added to the diagonal, so that dependent features have a solution."""


def truncated(autoencoder: Any, divisor: int, where: Where) -> Any:
    """A copy whose decoder ends at ``1 / divisor`` of the size, with features [B, C, H / divisor, W / divisor].

    `where`: ``entry``, right after the upsampling to that size, or ``end``, after all layers of that size. Of an
    `AutoencoderKL` or `AutoencoderDC`; raises ValueError if the decoder has no such size.
    """
    levels = len(autoencoder.decoder.up_blocks)
    index = levels - 1 - (divisor.bit_length() - 1)
    """Of the first up-block of that size, in the order of computation; the latents' size is 0."""
    if divisor & (divisor - 1) or not 0 <= index < levels or (index == 0 and where == "entry"):
        raise ValueError(f"a decoder of {levels} up-blocks cannot be left at 1/{divisor}, {where}")
    result = copy.copy(autoencoder)
    result._modules = dict(autoencoder._modules)
    decoder = result.decoder = _shallow(autoencoder.decoder)
    if isinstance(autoencoder, AutoencoderDC):  # its blocks begin with the upsampling, and are listed last first
        blocks = list(decoder.up_blocks)[::-1][: index + 1]
        if where == "entry":
            blocks[-1] = nn.Sequential(blocks[-1][0])
        decoder.up_blocks = nn.ModuleList(blocks[::-1])
        decoder.norm_out, decoder.conv_act, decoder.conv_out = nn.Identity(), nn.Identity(), nn.Identity()
        return result
    blocks = list(decoder.up_blocks)[: index + (where == "end")]  # its blocks end with the upsampling to the next size
    if where == "end":
        blocks[-1] = _shallow(blocks[-1])
        blocks[-1].upsamplers = None
    decoder.up_blocks = nn.ModuleList(blocks)
    decoder.conv_norm_out, decoder.conv_act, decoder.conv_out = nn.Identity(), nn.Identity(), nn.Identity()
    return result


def _shallow(module: Any) -> Any:
    """A copy that shares its parts."""
    result = copy.copy(module)
    result._modules = dict(module._modules)
    return result


class Readout(nn.Module):
    """Features [B, C, h, w] to pixels [B, 3, h, w] in [-1, 1]."""

    def __init__(self, kernel: int, groups: int) -> None:
        """`groups` of the normalised, activated copy of the features that is read beside them; 0: none."""
        super().__init__()
        self.kernel, self.groups = kernel, groups
        self.weight: Tensor

    def expand(self, features: Tensor) -> Tensor:
        """What is read, linearly."""
        if not self.groups:
            return features
        return torch.cat([features, F.silu(F.group_norm(features, self.groups))], dim=1)

    def forward(self, features: Tensor) -> Tensor:
        features = self.expand(features)
        channels = features.shape[1]
        weight = self.weight[:, :-1].reshape(3, channels, self.kernel, self.kernel).to(features.dtype)
        padded = F.pad(features, (self.kernel // 2,) * 4, mode="replicate") if self.kernel > 1 else features
        return F.conv2d(padded, weight, self.weight[:, -1].to(features.dtype))


@torch.no_grad()
def fit(autoencoder: Any, divisor: int, where: Where, latents: Sequence[Tensor], *, kernel: int, groups: int) -> Any:
    """An autoencoder that decodes to ``1 / divisor`` of the resolution.

    Args:
        latents: batches as `autoencoder.decode` takes them; in this order they are summed up, in float64.
    """
    early = truncated(autoencoder, divisor, where)
    readout = Readout(kernel, groups)
    gram = moments = None
    for batch in latents:
        wanted = F.avg_pool2d(autoencoder.decode(batch, return_dict=False)[0].float(), divisor)
        features = readout.expand(early.decode(batch, return_dict=False)[0].float())
        if kernel > 1:
            features = F.pad(features, (kernel // 2,) * 4, mode="replicate")
        rows = F.unfold(features, kernel).transpose(1, 2).flatten(0, 1).double()
        rows = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
        targets = wanted.flatten(2).transpose(1, 2).flatten(0, 1).double()
        gram = rows.T @ rows + (0 if gram is None else gram)
        moments = rows.T @ targets + (0 if moments is None else moments)
    assert gram is not None
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    readout.weight = torch.linalg.solve(gram, moments).T.float()
    early.decoder.conv_out = readout
    return early
