"""FLUX.2 [klein], with or without reference images, from diffusers `Flux2KleinPipeline` checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from solrl_ray.config.guidance import Cfg
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.flux import DOUBLE_ATTENTION, Flux
from solrl_ray.models.libraries import Stock, torch
from solrl_ray.models.references import MEGAPIXEL, SeesReferences
from solrl_ray.policy.tool_names import KOHYA, NATIVE, Style, ToolNames, table
from solrl_ray.records import SampleShape

if TYPE_CHECKING:
    from torch import Tensor

APART = 10
"""Spacing of the references in the first coordinate of positions; the sample has 0 there, reference n has n times this.
"""


class Flux2Klein(DiffusionModel):
    """Latents are packed as in the pipeline: [B, tokens, 128], one token per 2x2 patch, row by row.

    Text: three hidden layers of Qwen3, concatenated in width, with the prompt inside its chat template; padding is not
    masked. The timestep is sigma, rounded to the transformer's dtype. Patches are normalised by the running statistics
    of a batch norm in the autoencoder.
    """

    PIPELINE = Stock("Flux2KleinPipeline")
    TRANSFORMER = Stock("Flux2Transformer2DModel")
    DECODERS = ("AutoencoderKLFlux2",)
    ENCODERS = ("text_encoder",)
    # kept_values are those of FLUX.1: not measured.
    SIZES = replace(Flux.SIZES, forward_values=22.4, references=(0, 4))
    ROUNDS_TIMESTEPS = True
    DISTILLED = frozenset({"black-forest-labs/FLUX.2-klein-4B", "black-forest-labs/FLUX.2-klein-9B"})
    TOOL_NAMES = ToolNames(
        {
            **DOUBLE_ATTENTION,
            **table(
                "double_blocks.#",
                "transformer_blocks.#",
                """
                img_mlp.0  ff.linear_in
                img_mlp.2  ff.linear_out
                txt_mlp.0  ff_context.linear_in
                txt_mlp.2  ff_context.linear_out
                """,
            ),
            **table(
                "single_blocks.#",
                "single_transformer_blocks.#",
                """
                linear1  attn.to_qkv_mlp_proj
                linear2  attn.to_out
                """,
            ),
        },
        {"comfyui": Style(NATIVE, published=True), "kohya": Style(KOHYA, published=True)},
    )

    @classmethod
    def cfg_arguments(cls, cfg: Cfg) -> dict[str, Any]:
        return {cls.GUIDED_BY: cfg.scale}

    @classmethod
    def keeps_references(cls, shape: SampleShape) -> bool:
        return shape.pixels <= MEGAPIXEL

    def _set_up_shape(self, rows: int, columns: int) -> None:
        one = torch.arange(1)
        self._image_ids = torch.cartesian_prod(one, torch.arange(rows), torch.arange(columns), one).to(self.device)

    def _encode(self, pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` [B, max_sequence_length, 3 · width]."""
        sequence, _ = self._encode_prompt(pipeline, texts)
        return {"prompt_embeds": sequence}

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        sequence = embedding["prompt_embeds"]
        text_ids = torch.nn.functional.pad(torch.arange(sequence.shape[1], device=self.device)[:, None], (3, 0))
        return self._call(
            hidden_states=latents,
            timestep=sigmas.to(self.dtype),
            guidance=None,
            encoder_hidden_states=sequence,
            txt_ids=text_ids,
            img_ids=self._image_ids[: latents.shape[1]],
        )

    def _unpacked(self, latents: Tensor) -> Tensor:
        return latents.transpose(1, 2).unflatten(2, self._grid)

    def stock_latents(self, latents: Tensor) -> Tensor:
        return self._unpacked(latents)  # the pipeline packs latents itself

    def _denormalised(self, decoder: Any, latents: Tensor) -> Tensor:
        mean, variance = decoder.bn.running_mean.float(), decoder.bn.running_var.float()
        deviation = torch.sqrt(variance + decoder.config["batch_norm_eps"])
        return torch.nn.functional.pixel_shuffle(
            latents * deviation[:, None, None] + mean[:, None, None], self.SIZES.patch
        )

    @classmethod
    def _token_counts(cls, tokenizer: Any, texts: Sequence[str]) -> list[int]:
        chats = [[{"role": "user", "content": text}] for text in texts]
        template = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        return super()._token_counts(tokenizer, [tokenizer.apply_chat_template(chat, **template) for chat in chats])


class Flux2KleinSeeing(SeesReferences, Flux2Klein):
    """FLUX.2 [klein] with references of the samples' size. The stock pipeline shrinks those above 1024² pixels."""

    def _set_up_shape(self, rows: int, columns: int) -> None:
        super()._set_up_shape(rows, columns)
        sample = self._image_ids
        references = [
            sample + torch.tensor([APART * (n + 1), 0, 0, 0], device=sample.device)
            for n in range(self.config.references)
        ]
        self._image_ids = torch.cat([sample, *references])

    def _normalised(self, vae: Any, latents: Tensor) -> Tensor:
        """Patches, with each channel normalised by the running statistics of the autoencoder's batch norm."""
        patches = torch.nn.functional.pixel_unshuffle(latents, self.SIZES.patch)
        mean, variance = vae.bn.running_mean, vae.bn.running_var
        deviation = torch.sqrt(variance + vae.config["batch_norm_eps"])
        return (patches - mean.to(latents)[:, None, None]) / deviation.to(latents)[:, None, None]

    def _packed(self, latents: Tensor) -> Tensor:
        return latents.flatten(2).transpose(1, 2)


FAMILIES = {"flux2_klein": Flux2KleinSeeing}
