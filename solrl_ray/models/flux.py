"""FLUX.1, and FLUX.1 Kontext for image editing, from their diffusers checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from solrl_ray.config.schema import Model
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.libraries import Stock, torch
from solrl_ray.models.references import SeesReferences
from solrl_ray.models.sizes import KL, FamilySizes
from solrl_ray.policy.tool_names import KOHYA, OURS, Style, ToolNames, table

if TYPE_CHECKING:
    from torch import Tensor

DOUBLE_ATTENTION = table(
    "double_blocks.#",
    "transformer_blocks.#",
    """
    img_attn.qkv   attn.to_q attn.to_k attn.to_v
    img_attn.proj  attn.to_out.0
    txt_attn.qkv   attn.add_q_proj attn.add_k_proj attn.add_v_proj
    txt_attn.proj  attn.to_add_out
    """,
)


class Flux(DiffusionModel):
    """Latents are packed as in `FluxPipeline`: [B, tokens, channels], one token per 2x2 patch, row by row.

    Text: CLIP (pooled, 77 tokens) and T5 (sequence). The timestep is sigma, rounded to the transformer's dtype as in
    Sol-RL's sampler. If the checkpoint has a guidance embedding, it is used. The stock pipeline rounds 1000 sigma and
    then divides, which gives other values in bfloat16.
    """

    PIPELINE = Stock("FluxPipeline")
    TRANSFORMER = Stock("FluxTransformer2DModel")
    DECODERS = ("AutoencoderKL", "AutoencoderTiny")
    ENCODERS: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2")
    SIZES = FamilySizes(patch=2, longest=512, packed=True, kept_values=(13.0, 16.4), forward_values=17.3, decoder=KL)
    ROUNDS_TIMESTEPS = True
    EMBEDS_GUIDANCE = True
    GUIDED_BY = "true_cfg_scale"
    DISTILLED = frozenset({"black-forest-labs/FLUX.1-schnell"})
    TOOL_NAMES = ToolNames(
        {
            **DOUBLE_ATTENTION,
            **table(
                "double_blocks.#",
                "transformer_blocks.#",
                """
                img_mlp.0    ff.net.0.proj
                img_mlp.2    ff.net.2
                img_mod.lin  norm1.linear
                txt_mlp.0    ff_context.net.0.proj
                txt_mlp.2    ff_context.net.2
                txt_mod.lin  norm1_context.linear
                """,
            ),
            **table(
                "single_blocks.#",
                "single_transformer_blocks.#",
                """
                linear1         attn.to_q attn.to_k attn.to_v proj_mlp
                linear2         proj_out
                modulation.lin  norm.linear
                """,
            ),
        },
        {"comfyui": Style(OURS, published=False), "kohya": Style(KOHYA, published=True)},
        # Names in LoRA files of XLabs, https://github.com/XLabs-AI/x-flux
        table(
            "double_blocks.#.processor",
            "transformer_blocks.#",
            """
            qkv_lora1   attn.to_q attn.to_k attn.to_v
            proj_lora1  attn.to_out.0
            qkv_lora2   attn.add_q_proj attn.add_k_proj attn.add_v_proj
            proj_lora2  attn.to_add_out
            """,
        )
        | table(
            "single_blocks.#.processor",
            "single_transformer_blocks.#",
            """
            qkv_lora   attn.to_q attn.to_k attn.to_v
            proj_lora  proj_out
            """,
        ),
    )

    @classmethod
    def stock_arguments(cls, model: Model) -> dict[str, Any]:
        return {"guidance_scale": model.guidance}

    def _set_up(self, transformer_config: Mapping[str, Any]) -> None:
        self._embeds_guidance = bool(transformer_config.get("guidance_embeds", False))

    def _set_up_shape(self, rows: int, columns: int) -> None:
        row, column = (torch.arange(count, dtype=torch.float32) for count in (rows, columns))
        self._image_ids = torch.cartesian_prod(torch.zeros(1), row, column).to(self.device)

    def _encode(self, pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` [B, max_sequence_length, width], ``pooled_prompt_embeds`` [B, width]."""
        sequence, pooled, _ = self._encode_prompt(pipeline, texts)
        return {"prompt_embeds": sequence, "pooled_prompt_embeds": pooled}

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        guidance = None
        if self._embeds_guidance:
            guidance = torch.full((len(latents),), self.config.guidance, dtype=torch.float32, device=self.device)
        sequence = embedding["prompt_embeds"]
        return self._call(
            hidden_states=latents,
            timestep=sigmas.to(self.dtype),
            guidance=guidance,
            pooled_projections=embedding["pooled_prompt_embeds"],
            encoder_hidden_states=sequence,
            txt_ids=torch.zeros(sequence.shape[1], 3, device=self.device),
            img_ids=self._image_ids[: latents.shape[1]],
        )

    def _unpacked(self, latents: Tensor) -> Tensor:
        return unpack(latents, *self._grid)


class FluxKontext(SeesReferences, Flux):
    """FLUX.1 with the tokens of one reference image after those of the sample.

    The first coordinate of a position is 1 for tokens of the reference and 0 for those of the sample. The reference has
    the size of the sample; arguments of the stock call prevent it from resizing.
    """

    PIPELINE = Stock("FluxKontextPipeline")
    SIZES = replace(Flux.SIZES, references=(1, 1))

    @classmethod
    def stock_arguments(cls, model: Model) -> dict[str, Any]:
        """See `Flux`. Without these arguments, the pipeline resizes samples to 1024² pixels, and references to one of
        its preferred sizes.
        """
        keep_sizes = {"max_area": model.shapes[0].pixels, "_auto_resize": False}
        return super().stock_arguments(model) | keep_sizes

    def _set_up_shape(self, rows: int, columns: int) -> None:
        super()._set_up_shape(rows, columns)
        reference = self._image_ids + torch.tensor([1.0, 0, 0], device=self.device)
        self._image_ids = torch.cat([self._image_ids, reference])


def unpack(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """Tokens [B, rows * columns, 4C] → latents [B, C, 2 rows, 2 columns]."""
    shuffled = torch.nn.functional.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (rows, columns)), Flux.SIZES.patch)
    # Contiguous, because the decoder's convolutions round differently in channels-last format.
    return shuffled.contiguous(memory_format=torch.contiguous_format)


FAMILIES = {"flux": Flux, "flux_kontext": FluxKontext}
