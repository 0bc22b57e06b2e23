"""Chroma1, FLUX.1 without CLIP and without distilled guidance, through the parts of a diffusers `ChromaPipeline`."""

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
    """Latents, positions and timestep as of FLUX.1, without a guidance embedding.

    Text: T5, whose mask leaves one pad beside a prompt's own tokens. The authors mask the other pads inside the
    transformer as well. diffusers (0.42) passes that mask as numbers, which attention adds to its logits: pads keep
    1/e of a token's weight. So it is here, or LoRAs would be trained for other images than the stock pipeline draws.

    The stock forward with gradient checkpointing forgets the mask of the single blocks; here they get it.
    """

    PIPELINE = Stock("ChromaPipeline")
    TRANSFORMER = Stock("ChromaTransformer2DModel")
    ENCODERS = ("text_encoder",)
    EMBEDS_GUIDANCE = False
    GUIDED_BY = "guidance_scale"
    # Neither the activations that its blocks keep nor those of a forward were measured.
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
    """Within it a recomputed single block gets the mask too, as its last argument."""
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
