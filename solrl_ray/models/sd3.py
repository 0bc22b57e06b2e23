"""Stable Diffusion 3 and 3.5, from diffusers `StableDiffusion3Pipeline` checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.libraries import Stock, torch
from solrl_ray.models.sizes import KL, FamilySizes
from solrl_ray.policy.tool_names import KOHYA, OURS, Style, ToolNames, table

if TYPE_CHECKING:
    from torch import Tensor

TIMESTEPS = 1000
"""Timesteps of the diffusion process that the transformer was trained with; its timestep is sigma times this."""


class StableDiffusion3(DiffusionModel):
    """Latents [B, 16, H/8, W/8].

    Text: the tokens of two CLIP encoders (77 tokens, concatenated in width), followed by those of T5, or zeros without
    T5. The timestep is sigma · 1000 in float32, never rounded. In the published code, the sampler rounded it down to an
    integer and the training did not; we use the same value in both.
    """

    PIPELINE = Stock("StableDiffusion3Pipeline")
    TRANSFORMER = Stock("SD3Transformer2DModel")
    DECODERS = ("AutoencoderKL", "AutoencoderTiny")
    ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
    OPTIONAL = frozenset({"text_encoder_3"})
    SIZES = FamilySizes(
        patch=2,
        longest=512,
        packed=False,
        clip=True,
        positions="pos_embed_max_size",
        kept_values=(14.4, 22.5),
        forward_values=12.7,
        decoder=KL,
    )
    TRAINS_ON_CUDNN = True
    DISTILLED = frozenset({"stabilityai/stable-diffusion-3.5-large-turbo"})
    # The modulation of the text is left out: its halves are swapped in the last block.
    TOOL_NAMES = ToolNames(
        table(
            "joint_blocks.#",
            "transformer_blocks.#",
            """
            x_block.attn.qkv            attn.to_q attn.to_k attn.to_v
            x_block.attn.proj           attn.to_out.0
            x_block.attn2.qkv           attn2.to_q attn2.to_k attn2.to_v
            x_block.attn2.proj          attn2.to_out.0
            x_block.mlp.fc1             ff.net.0.proj
            x_block.mlp.fc2             ff.net.2
            x_block.adaLN_modulation.1  norm1.linear
            context_block.attn.qkv      attn.add_q_proj attn.add_k_proj attn.add_v_proj
            context_block.attn.proj     attn.to_add_out
            context_block.mlp.fc1       ff_context.net.0.proj
            context_block.mlp.fc2       ff_context.net.2
            """,
        ),
        {"comfyui": Style(OURS, published=False), "kohya": Style(KOHYA, published=True)},
    )

    def _set_up(self, transformer_config: Mapping[str, Any]) -> None:
        self._text_width = int(transformer_config["joint_attention_dim"])

    def _encode(self, pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` [B, 77 + max_sequence_length, width], ``pooled_prompt_embeds`` [B, width]."""
        if pipeline.text_encoder_3 is None:
            return self._encode_without_t5(pipeline, texts)
        sequence, _, pooled, _ = self._encode_prompt(pipeline, texts, None, None, do_classifier_free_guidance=False)
        return {"prompt_embeds": sequence, "pooled_prompt_embeds": pooled}

    def _encode_without_t5(self, pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
        """`encode_prompt` without T5. The stock method would read the width of T5 from a loaded transformer."""
        clips = [pipeline._get_clip_prompt_embeds(texts, device=self.device, clip_model_index=i) for i in (0, 1)]
        sequence = torch.cat([clip[0] for clip in clips], dim=-1)
        sequence = torch.nn.functional.pad(sequence, (0, self._text_width - sequence.shape[-1]))
        t5 = sequence.new_zeros(len(texts), self.config.max_sequence_length, self._text_width)
        pooled = torch.cat([clip[1] for clip in clips], dim=-1)
        return {"prompt_embeds": torch.cat([sequence, t5], dim=1), "pooled_prompt_embeds": pooled}

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        return self._call(
            hidden_states=latents,
            timestep=sigmas * TIMESTEPS,
            encoder_hidden_states=embedding["prompt_embeds"],
            pooled_projections=embedding["pooled_prompt_embeds"],
        )


FAMILIES = {"sd3": StableDiffusion3}
