"""Qwen-Image, from diffusers `QwenImagePipeline` checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from solrl_ray.models import attention
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.flux import unpack
from solrl_ray.models.libraries import Stock, torch
from solrl_ray.models.sizes import DecoderSizes, FamilySizes
from solrl_ray.policy.tool_names import KOHYA, NATIVE, Style, ToolNames

if TYPE_CHECKING:
    from torch import Tensor


class QwenImage(DiffusionModel):
    """Latents are packed as in the pipeline: [B, tokens, 64], one token per 2x2 patch, row by row.

    Text: the last hidden layer of Qwen2.5-VL, with the prompt inside the pipeline's template. The first 34 tokens,
    which belong to the template, are cut off after encoding. Texts are padded with masked zeros to
    `max_sequence_length` tokens, as the stock pipeline pads shorter texts in a batch. Positions of the image do not
    depend on the text's length. The timestep is sigma, rounded to the transformer's dtype. The autoencoder is for
    videos, and is used with one frame.
    """

    PIPELINE = Stock("QwenImagePipeline")
    TRANSFORMER = Stock("QwenImageTransformer2DModel")
    DECODERS = ("AutoencoderKLQwenImage",)
    ENCODERS = ("text_encoder",)
    # Activations are estimated: counted in narrow eager blocks on a CPU, and scaled like those of SD3.5.
    SIZES = FamilySizes(
        patch=2,
        longest=1024,
        packed=True,
        kept_values=(17.0, 26.5),
        forward_values=14.4,
        decoder=DecoderSizes(parameters=126_892_531, bytes_a_pixel=3462),
    )
    ROUNDS_TIMESTEPS = True
    GUIDED_BY = "true_cfg_scale"
    TOOL_NAMES = ToolNames(
        {
            f"transformer_blocks.#.{name}": (f"transformer_blocks.#.{name}",)
            for name in (
                *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
                *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
                *(
                    "img_mod.1",
                    "img_mlp.net.0.proj",
                    "img_mlp.net.2",
                    "txt_mod.1",
                    "txt_mlp.net.0.proj",
                    "txt_mlp.net.2",
                ),
            )
        },
        {"comfyui": Style(NATIVE, published=False), "kohya": Style(KOHYA, published=False)},
    )

    def _encode(self, pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` [B, max_sequence_length, width], ``prompt_embeds_mask`` [B, max_sequence_length].

        Texts are encoded one by one: the pipeline pads a batch to its longest text, so shapes would depend on it.
        """
        longest = self.config.max_sequence_length
        options = {"device": self.device, "max_sequence_length": longest}
        return fixed_length([pipeline.encode_prompt(text, **options)[0][0][:longest] for text in texts], longest)

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        sequence, mask = embedding["prompt_embeds"], embedding["prompt_embeds_mask"]
        if latents.is_cuda and attention.is_memory_efficient():
            sequence, mask = attention.padded_text(sequence, mask, beside=latents.shape[1])
        return self._call(
            hidden_states=latents,
            timestep=sigmas.to(self.dtype),
            encoder_hidden_states=sequence,
            encoder_hidden_states_mask=mask,
            img_shapes=self._shapes(latents.shape[1] // self.image_tokens),
        )

    def _shapes(self, images: int) -> Any:
        """The transformer's argument for the shape of a sample without references: frames, rows, columns."""
        return (1, *self._grid)

    def _combined(self, positive: Tensor, negative: Tensor, scale: float) -> Tensor:
        """Guided velocity, in which each token is rescaled to the norm it has without guidance, as in the pipeline."""
        guided = super()._combined(positive, negative, scale)
        return guided * (positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    def _unpacked(self, latents: Tensor) -> Tensor:
        return unpack(latents, *self._grid)

    def _denormalised(self, decoder: Any, latents: Tensor) -> Tensor:
        mean, std = (latents.new_tensor(decoder.config[f"latents_{name}"])[:, None, None] for name in ("mean", "std"))
        return (latents * std + mean).unsqueeze(2)

    def _decode(self, decoder: Any, latents: Tensor) -> Tensor:
        return super()._decode(decoder, latents)[:, :, 0]

    @classmethod
    def _token_counts(cls, tokenizer: Any, texts: Sequence[str]) -> list[int]:
        stock = cls._stock()
        whole = super()._token_counts(tokenizer, [stock.prompt_template_encode.format(text) for text in texts])
        return [count - stock.prompt_template_encode_start_idx for count in whole]

    @classmethod
    def _stock(cls) -> Any:
        """The pipeline without components, for its prompt template."""
        return cls.PIPELINE(**dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "transformer")))


def fixed_length(texts: Sequence[Tensor], tokens: int) -> dict[str, Tensor]:
    """Pad texts [n, width] with zeros to `tokens` tokens each.

    Returns ``prompt_embeds`` [B, tokens, width] and ``prompt_embeds_mask`` [B, tokens], true for the tokens of a text.
    Raises `ValueError` if a text is longer.
    """
    lengths = [len(text) for text in texts]
    if max(lengths) > tokens:
        raise ValueError(f"a text of {max(lengths)} tokens does not fit into {tokens}")
    padded = [torch.nn.functional.pad(text, (0, 0, 0, tokens - len(text))) for text in texts]
    mask = torch.arange(tokens) < torch.tensor(lengths)[:, None]
    return {"prompt_embeds": torch.stack(padded), "prompt_embeds_mask": mask}


FAMILIES = {"qwen_image": QwenImage}
