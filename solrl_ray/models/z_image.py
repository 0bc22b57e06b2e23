"""Z-Image, from diffusers `ZImagePipeline` checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from solrl_ray.config.guidance import Cfg
from solrl_ray.config.schema import Model
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.libraries import Stock
from solrl_ray.models.qwen_image import fixed_length
from solrl_ray.models.sizes import KL, FamilySizes
from solrl_ray.policy.tool_names import KOHYA, NATIVE, Style, ToolNames, table

if TYPE_CHECKING:
    from torch import Tensor, nn


class ZImage(DiffusionModel):
    """Latents [B, 16, H/8, W/8].

    Text: the second-to-last hidden layer of Qwen3, with the prompt inside its chat template, encoded without padding.
    It is then padded with zeros to a fixed number of tokens. `FixedTextTransformer` treats this padding as the stock
    transformer treats shorter texts in a batch.

    The transformer's time runs from 0 (noise) to 1 (image), and it predicts image - noise. So it gets 1 - sigma in
    float32, and its output is negated.
    """

    PIPELINE = Stock("ZImagePipeline")
    TRANSFORMER = Stock("ZImageTransformer2DModel")
    DECODERS = ("AutoencoderKL", "AutoencoderTiny")
    ENCODERS = ("text_encoder",)
    SIZES = FamilySizes(  # activations are estimated as for Qwen-Image
        patch=2,
        longest=512,  # default of the stock call, which has no documented limit
        packed=False,
        text_multiple=32,
        width=("dim",),
        positions="axes_lens",
        kept_values=(20.0, 31.0),
        forward_values=15.9,
        decoder=KL,
    )
    DISTILLED = frozenset({"Tongyi-MAI/Z-Image-Turbo"})
    TOOL_NAMES = ToolNames(
        {
            name: parts
            for block in ("layers.#", "noise_refiner.#", "context_refiner.#")
            for name, parts in table(
                block,
                block,
                """
                attention.qkv    attention.to_q attention.to_k attention.to_v
                attention.out    attention.to_out.0
                feed_forward.w1  feed_forward.w1
                feed_forward.w2  feed_forward.w2
                feed_forward.w3  feed_forward.w3
                """,
            ).items()
        },
        {"comfyui": Style(NATIVE, published=False), "kohya": Style(KOHYA, published=False)},
    )

    @classmethod
    def stock_arguments(cls, model: Model) -> dict[str, Any]:
        return {cls.GUIDED_BY: 0.0}

    @classmethod
    def cfg_arguments(cls, cfg: Cfg) -> dict[str, Any]:
        """The pipeline adds (scale - 1) · difference to the prompt's velocity; it can stop guidance near the image."""
        stop = {"cfg_truncation": 1 - cfg.interval[0]} if cfg.interval[0] else {}
        return super().cfg_arguments(cfg) | {cls.GUIDED_BY: cfg.scale - 1} | stop

    def _encode(self, pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` [B, n, width], ``prompt_embeds_mask`` [B, n]; n is `FamilySizes.text_tokens`."""
        copied = list(texts)  # the pipeline modifies the list
        sequences, _ = self._encode_prompt(pipeline, copied, do_classifier_free_guidance=False)
        return fixed_length(sequences, self.SIZES.text_tokens(self.config))

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        return -self._call(
            hidden_states=latents,
            timestep=1 - sigmas,
            encoder_hidden_states=embedding["prompt_embeds"],
            encoder_hidden_states_mask=embedding["prompt_embeds_mask"],
        )

    @classmethod
    def adapt_(cls, transformer: nn.Module) -> nn.Module:
        from solrl_ray.models.z_image_layers import FixedTextTransformer

        transformer.__class__ = FixedTextTransformer  # keeps modules and weights, replaces the forward
        return transformer

    @classmethod
    def _token_counts(cls, tokenizer: Any, texts: Sequence[str]) -> list[int]:
        chats = [[{"role": "user", "content": text}] for text in texts]
        template = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": True}
        return super()._token_counts(tokenizer, [tokenizer.apply_chat_template(chat, **template) for chat in chats])


FAMILIES = {"z_image": ZImage}
