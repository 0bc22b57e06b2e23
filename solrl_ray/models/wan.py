"""Wan's text-to-video models, through the parts of a diffusers `WanPipeline` checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from solrl_ray.config.schema import Model, QuantizationScope
from solrl_ray.errors import UserError
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.checkpoint import KEY, Checkpoint
from solrl_ray.models.libraries import Stock
from solrl_ray.models.shapes import LinearShape
from solrl_ray.models.sizes import DecoderSizes, FamilySizes
from solrl_ray.policy.tool_names import KOHYA, NATIVE, Style, ToolNames, table
from solrl_ray.quantization.planning import plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

TIMESTEPS = 1000
"""Timesteps of the diffusion process that the transformer was trained with; its timestep is sigma times this."""
TIME_EMBEDDER = "condition_embedder.time_embedder"
# Bytes per pixel of a frame, while one latent frame is decoded.
WAN_VAE = DecoderSizes(parameters=126_892_531, bytes_a_pixel=10_176)
WAN22_VAE = DecoderSizes(parameters=704_688_668, bytes_a_pixel=10_818)


class Wan(DiffusionModel):
    """Latents [B, channels, T, H/8, W/8] of Wan 2.1, H/16 and W/16 of Wan 2.2 TI2V; T = 1 + (frames - 1) / 4.

    Text: the last hidden layer of UMT5, padded with zeros, without a mask. The timestep is 1000 sigma, in float32. For
    checkpoints with ``expand_timesteps`` the pipeline passes one timestep per token. Without a given first frame they
    are all equal, so the transformer gets the timestep once. The autoencoder is causal and decodes latent frames one by
    one: the first gives one frame, each later one four.
    """

    PIPELINE = Stock("WanPipeline")
    TRANSFORMER = Stock("WanTransformer3DModel")
    DECODERS = ("AutoencoderKLWan",)
    ENCODERS = ("text_encoder",)
    # Activations are estimated as for Qwen-Image, for the 1.3B model, whose feed-forward is relatively the widest.
    SIZES = FamilySizes(
        patch=2,
        longest=512,
        packed=False,
        text_in_blocks=False,
        schedules=("flow_shift", "shift"),
        frame_stride=4,
        kept_values=(21.7, 33.9),
        forward_values=16.0,
        decoder=WAN_VAE,
        other_decoders={16: WAN22_VAE},
    )
    TOOL_NAMES = ToolNames(
        table(
            "blocks.#",
            "blocks.#",
            """
            self_attn.q       attn1.to_q
            self_attn.k       attn1.to_k
            self_attn.v       attn1.to_v
            self_attn.o       attn1.to_out.0
            cross_attn.q      attn2.to_q
            cross_attn.k      attn2.to_k
            cross_attn.v      attn2.to_v
            cross_attn.k_img  attn2.add_k_proj
            cross_attn.v_img  attn2.add_v_proj
            cross_attn.o      attn2.to_out.0
            ffn.0             ffn.net.0.proj
            ffn.2             ffn.net.2
            """,
        ),
        {"comfyui": Style(NATIVE, published=True), "kohya": Style(KOHYA, published=True)},
    )

    def _encode(self, pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` [B, max_sequence_length, width]."""
        sequence, _ = self._encode_prompt(pipeline, texts, do_classifier_free_guidance=False)
        return {"prompt_embeds": sequence}

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        return self._call(latents, timestep=sigmas * TIMESTEPS, encoder_hidden_states=embedding["prompt_embeds"])

    def _denormalised(self, decoder: Any, latents: Tensor) -> Tensor:
        return denormalised(decoder, latents)

    @classmethod
    def adapt_(cls, transformer: nn.Module) -> nn.Module:
        from solrl_ray.models.wan_layers import TimeEmbedder

        transformer.get_submodule(TIME_EMBEDDER).__class__ = TimeEmbedder  # keeps weights and paths
        return transformer

    @classmethod
    def _open(cls, config: Model, key: str = KEY) -> Checkpoint:
        checkpoint = super()._open(config, key)
        if checkpoint.has("transformer_2"):
            raise UserError(
                f"{key} is {config.path!r}, which has two transformers, one for high and one for low noise levels; "
                f"model.family {config.family!r} supports checkpoints with one transformer."
            )
        _check_scope(config.quantization, checkpoint.settings("transformer"))
        return checkpoint

    @classmethod
    def _token_counts(cls, tokenizer: Any, texts: Sequence[str]) -> list[int]:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean  # as the pipeline prepares a text

        return super()._token_counts(tokenizer, [prompt_clean(text) for text in texts])


def denormalised(vae: Any, latents: Tensor) -> Tensor:
    """Undo the normalisation of latents [B, channels, T, rows, columns]; returns them as the autoencoder takes them."""
    mean, std = (latents.new_tensor(vae.config[f"latents_{name}"])[:, None, None, None] for name in ("mean", "std"))
    return latents * std + mean


def normalised(vae: Any, latents: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `denormalised`, in `dtype`."""
    latents = latents.float()  # as in the stock pipeline, only the input of the transformer is rounded
    mean, std = (latents.new_tensor(vae.config[f"latents_{name}"])[:, None, None, None] for name in ("mean", "std"))
    return ((latents - mean) / std).to(dtype)


def _check_scope(scope: QuantizationScope, transformer: Mapping[str, Any]) -> None:
    """Raise `UserError` if the time embedder would be quantised: the stock forward reads the dtype of its parameters,
    which quantised layers do not have.
    """
    width = int(transformer["num_attention_heads"]) * int(transformer["attention_head_dim"])
    linears = {f"{TIME_EMBEDDER}.linear_1": LinearShape(int(transformer.get("freq_dim", 256)), width)}
    if plan(linears, "nvfp4-emulated", scope).quantized:
        raise UserError(
            f"model.quantization.skip is {scope.skip}, but the time embedder of Wan's transformer cannot be quantised: "
            "add 'condition_embedder' to the list."
        )


FAMILIES = {"wan": Wan}
