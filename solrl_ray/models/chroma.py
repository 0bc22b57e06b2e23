"""Chroma1 (FLUX.1 without CLIP and without distilled guidance), from diffusers `ChromaPipeline` checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from solrl_ray.models.flux import Flux
from solrl_ray.models.libraries import Stock, torch

if TYPE_CHECKING:
    from torch import Tensor, nn


class Chroma(Flux):
    """Latents, positions and timestep as in FLUX.1, without a guidance embedding.

    Text: T5, with a mask that leaves one padding token after the prompt's tokens. The authors also mask the remaining
    padding inside the transformer. diffusers (0.42) passes that mask as numbers, which attention adds to its logits, so
    padding keeps 1/e of a token's weight. We do the same: otherwise LoRAs would be trained for other images than those
    that the stock pipeline generates.

    The stock forward with gradient checkpointing does not pass the mask to the single blocks; ours does.
    """

    PIPELINE = Stock("ChromaPipeline")
    TRANSFORMER = Stock("ChromaTransformer2DModel")
    ENCODERS = ("text_encoder",)
    EMBEDS_GUIDANCE = False
    GUIDED_BY = "guidance_scale"
    # Its activations, in training and in a forward, were not measured.
    SIZES = replace(Flux.SIZES, kept_values=None, forward_values=None)

    def _encode(self, pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` [B, max_sequence_length, width], ``prompt_attention_mask`` [B, max_sequence_length]."""
        sequence, _, mask, *_ = self._encode_prompt(pipeline, texts, do_classifier_free_guidance=False)
        return {"prompt_embeds": sequence, "prompt_attention_mask": mask}

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        sequence = embedding["prompt_embeds"]
        mask = torch.nn.functional.pad(embedding["prompt_attention_mask"], (0, latents.shape[1]), value=1.0)
        with _masking_single_blocks(self.transformer, mask):
            return self._call(
                hidden_states=latents,
                timestep=sigmas.to(self.dtype),
                encoder_hidden_states=sequence,
                txt_ids=torch.zeros(sequence.shape[1], 3, device=self.device),
                img_ids=self._image_ids,
                attention_mask=mask,
            )


@contextmanager
def _masking_single_blocks(transformer: nn.Module, mask: Tensor) -> Iterator[None]:
    """Context in which recomputed single blocks also get the mask, as their last argument."""
    recompute: Any = getattr(transformer, "_gradient_checkpointing_func", None)
    single = set(transformer.single_transformer_blocks)  # type: ignore[arg-type]

    def masked(block: nn.Module, *inputs: Any) -> Any:
        return recompute(block, *inputs, *([mask] if block in single else []))

    if recompute is not None:
        transformer._gradient_checkpointing_func = masked  # type: ignore[assignment]
    try:
        yield
    finally:
        if recompute is not None:
            transformer._gradient_checkpointing_func = recompute


FAMILIES = {"chroma": Chroma}
