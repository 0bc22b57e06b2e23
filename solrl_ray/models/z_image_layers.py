"""Z-Image's transformer for texts of a fixed length."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn
from torch.nn import functional

ALIGNMENT = 32
"""The transformer was trained with images and texts padded to multiples of this many tokens. It attends to padding."""
PATCH = 2
PATCHES = "2-1"
"""Key of the transformer's layers for patches of 2 x 2 cells in one frame."""


class FixedTextTransformer(ZImageTransformer2DModel):
    """The stock transformer with a forward of fixed shapes, on tensors instead of lists.

    The stock transformer cuts each text to its length, pads it to a multiple of `ALIGNMENT` with tokens that are
    attended to, and gives the image the position after them. So the shapes of a forward depend on the texts, and
    compiled code would be recompiled. This class keeps texts at a fixed length. Positions, attended padding and the
    image's position still follow from the text's length; the remaining tokens are masked.
    """

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor,
        return_dict: bool = True,
    ) -> Any:
        """
        Args:
            hidden_states: latents [B, C, H, W].
            timestep: float32 [B], from 0 (noise) to 1 (image).
            encoder_hidden_states: texts [B, L, width], L a multiple of `ALIGNMENT`.
            encoder_hidden_states_mask: [B, L], 1 for the tokens of the text, which come first.

        Returns:
            [B, C, H, W], wrapped like the output of diffusers' transformers.
        """
        embedder = self.t_embedder  # not its forward, which reads the dtype of a weight: quantised layers have none
        waves = embedder.timestep_embedding(timestep * self.t_scale, embedder.frequency_embedding_size)
        time = embedder.mlp(waves.type_as(hidden_states)).type_as(hidden_states)
        is_text = encoder_hidden_states_mask.bool()
        lengths = aligned(is_text.sum(dim=1))
        attended = torch.arange(is_text.shape[1], device=is_text.device) < lengths[:, None]
        rows, columns = (side // PATCH for side in hidden_states.shape[2:])
        image_positions, text_positions = self._positions(lengths, is_text.shape[1], rows, columns)

        image = self.all_x_embedder[PATCHES](patches(hidden_states))
        pads = image_positions.shape[1] - rows * columns
        image = torch.cat([image, self.x_pad_token.to(image.dtype).expand(len(image), pads, -1)], dim=1)
        for block in self.noise_refiner:
            image = self._run(block, image, None, image_positions, time)

        text = torch.where(is_text[..., None], self.cap_embedder(encoder_hidden_states), self.cap_pad_token)
        for block in self.context_refiner:
            text = self._run(block, text, attended, text_positions)

        tokens = torch.cat([image, text], dim=1)
        mask = torch.cat([attended.new_ones(image.shape[:2]), attended], dim=1)
        positions = torch.cat([image_positions, text_positions], dim=1)
        for block in self.layers:
            tokens = self._run(block, tokens, mask, positions, time)
        predicted = self.all_final_layer[PATCHES](tokens[:, : rows * columns], c=time)
        sample = unpatched(predicted, rows, columns)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _positions(self, lengths: Tensor, text_tokens: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Rotary factors, complex [B, tokens, head_dim / 2]: of the image with its padding, and of the text."""
        device, batch = lengths.device, len(lengths)
        row, column = torch.meshgrid(
            torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
        )
        sides = torch.stack([row.flatten(), column.flatten()], dim=-1).expand(batch, -1, -1)
        frame = (lengths + 1)[:, None, None].expand(batch, rows * columns, 1)
        image = torch.cat([frame, sides], dim=-1)
        image = functional.pad(image, (0, 0, 0, aligned(rows * columns) - rows * columns))
        text = functional.pad(torch.arange(1, text_tokens + 1, device=device)[:, None], (0, 2)).expand(batch, -1, -1)
        factors = [self.rope_embedder(ids.flatten(0, 1)).unflatten(0, ids.shape[:2]) for ids in (image, text)]
        return factors[0], factors[1]

    def _run(self, block: nn.Module, *inputs: Tensor | None) -> Tensor:
        """Call a block, with gradient checkpointing if it is enabled."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            recomputed: Tensor = self._gradient_checkpointing_func(block, *inputs)
            return recomputed
        result: Tensor = block(*inputs)
        return result


def aligned(tokens: Any) -> Any:
    """Number of tokens (int or tensor), rounded up to a multiple of `ALIGNMENT`."""
    return tokens + -tokens % ALIGNMENT


def patches(latents: Tensor) -> Tensor:
    """Latents [B, C, 2 rows, 2 columns] → tokens [B, rows * columns, 4C]; channels are last within a token."""
    cells = latents.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))  # [B, C, rows, 2, columns, 2]
    return cells.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatched(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `patches`."""
    cells = tokens.unflatten(2, (PATCH, PATCH, -1)).unflatten(1, (rows, columns))  # [B, rows, columns, 2, 2, C]
    return cells.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
