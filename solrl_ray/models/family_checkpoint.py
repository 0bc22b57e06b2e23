"""Checkpoints of a family: their parts, their text encoders, and the facts that are known without loading weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from solrl_ray.common.progress_note import progress_note
from solrl_ray.config.guidance import Cfg
from solrl_ray.config.schema import Model
from solrl_ray.errors import UserError
from solrl_ray.models import decoders
from solrl_ray.models.checkpoint import KEY, Checkpoint
from solrl_ray.models.libraries import torch
from solrl_ray.models.sizes import FamilySizes
from solrl_ray.policy.tool_names import ToolNames
from solrl_ray.records import SampleShape

if TYPE_CHECKING:
    from torch import nn

    from solrl_ray.models.components import TextEncoders

COUNTED = 1000
"""Number of prompts that are tokenised at a time to count their tokens; 20,000 at once take 0.4 GB."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Prompts that one tokenizer truncates."""

    tokenizer: str
    limit: int
    """Number of tokens that it keeps, including its special tokens."""
    texts: tuple[str, ...]


def tokenizer_of(encoder: str) -> str:
    """Name of the tokenizer of an encoder in the checkpoint: ``tokenizer_2`` for ``text_encoder_2``."""
    return "tokenizer" + encoder.removeprefix("text_encoder")


class FamilyCheckpoint:
    """The part of `DiffusionModel` that describes the class, without a loaded model."""

    PIPELINE: ClassVar[Any]
    """The stock diffusers pipeline that computes the same."""
    INDEX: ClassVar[str] = ""
    """The pipeline that checkpoints of the family name in their index, if it is not `PIPELINE`."""
    TRANSFORMER: ClassVar[Any]
    """The diffusers class of the transformer."""
    DECODERS: ClassVar[tuple[str, ...]]
    """Supported diffusers classes of the autoencoder."""
    ENCODERS: ClassVar[tuple[str, ...]]
    """Names of the text encoders in the checkpoint; the last one is the long one."""
    OPTIONAL: ClassVar[frozenset[str]] = frozenset()
    """Members of `ENCODERS` that a checkpoint may lack, with their tokenizers."""
    SIZES: ClassVar[FamilySizes]
    """Sizes that a plan needs without loading the model."""
    ROUNDS_TIMESTEPS: ClassVar[bool] = False
    """Whether the stock pipeline rounds 1000 sigma to the transformer's dtype and divides afterwards. We round sigma.
    """
    TRAINS_ON_CUDNN: ClassVar[bool] = False
    """Whether we have verified that it trains with cuDNN's attention; see `models.attention`."""
    CONVOLUTIONS: ClassVar[tuple[str, ...]] = ()
    """Path suffixes of linears that are 1×1 convolutions in the checkpoint and its LoRA files."""
    TOOL_NAMES: ClassVar[ToolNames | None] = None
    """Names of its LoRA modules in files of ComfyUI and kohya's scripts; None if these do not support the family."""
    EMBEDS_GUIDANCE: ClassVar[bool] = False
    """Whether its transformers may have a guidance embedding."""
    DISTILLED: ClassVar[frozenset[str]] = frozenset()
    """Ids of checkpoints with built-in guidance. Only FLUX.2's index says so in the checkpoint itself."""
    LOADED_BY: ClassVar[str] = "DiffusionPipeline"
    """The diffusers class that loads the stock pipeline. `DiffusionPipeline` loads the class that the checkpoint names.
    """
    FRAMES: ClassVar[str] = "num_frames"
    """Argument of the stock call for the number of frames."""
    GUIDED_BY: ClassVar[str] = "guidance_scale"
    """Argument of the stock call for the scale of classifier-free guidance."""

    @classmethod
    def stock_arguments(cls, model: Model) -> dict[str, Any]:
        """Arguments of the stock call that disable classifier-free guidance and automatic changes to the prompt."""
        return {cls.GUIDED_BY: 1.0}

    @classmethod
    def cfg_arguments(cls, cfg: Cfg) -> dict[str, Any]:
        """Arguments of the stock call that enable classifier-free guidance."""
        return {cls.GUIDED_BY: cfg.scale, "negative_prompt": cfg.negative_prompt}

    @classmethod
    def keeps_references(cls, shape: SampleShape) -> bool:
        """Whether the stock pipeline uses reference images of this size without resizing them."""
        return True

    @classmethod
    def skeleton(cls, config: Model, key: str = KEY) -> nn.Module:
        """The transformer as built by `load`, on the meta device: shapes, but no memory."""
        checkpoint = cls._open(config, key)
        with torch.device("meta"):
            transformer = cls.TRANSFORMER.from_config(checkpoint.settings("transformer"))
        return cls.adapt_(transformer)

    @classmethod
    def settings(cls, config: Model, named: Callable[[str], str] = str) -> tuple[dict[str, Any], int]:
        """The transformer's ``config.json`` and the VAE downscale factor; reads only small JSON files.

        Raises `UserError`, as `load` does, for sizes that the checkpoint does not support; `named` as in
        `FamilySizes.check`.
        """
        checkpoint = cls._open(config)
        transformer_config, vae_config = checkpoint.settings("transformer"), checkpoint.settings("vae")
        factor = decoders.factor(vae_config)
        cls.SIZES.check(config, transformer_config, factor, named)
        decoders.preview_loader(config, vae_config, cls.DECODERS)
        return transformer_config, factor

    @classmethod
    def text_skeletons(cls, config: Model, key: str = KEY) -> dict[str, nn.Module]:
        """Name → text encoder on the meta device: shapes, but no memory. The last one is the long one."""
        checkpoint = cls._open(config, key)
        with torch.device("meta"):
            return {name: checkpoint.text_skeleton(name) for name in cls._encoders(checkpoint)}

    @classmethod
    def truncated(cls, config: Model, texts: Sequence[str]) -> list[Truncation]:
        """The texts that each tokenizer would truncate; loads only the tokenizers."""
        checkpoint = cls._open(config)
        found = []
        for name in map(tokenizer_of, cls._encoders(checkpoint)):
            tokenizer = checkpoint.load_tokenizer(name)
            limit = cls._token_limit(config, name, tokenizer)
            long: list[str] = []
            for start in range(0, len(texts), COUNTED):
                part = texts[start : start + COUNTED]
                with progress_note(f"counting tokens of {name}, {start:,} of {len(texts):,} prompts"):
                    lengths = cls._token_counts(tokenizer, part)
                long += [text for text, length in zip(part, lengths, strict=True) if length > limit]
            found.append(Truncation(name, limit, tuple(long)))
        return found

    @classmethod
    def is_distilled(cls, config: Model) -> bool | None:
        """Whether the checkpoint's index states that guidance is built in. Only FLUX.2's index has this entry; None
        without it.
        """
        return cls._open(config).index.get("is_distilled")

    @classmethod
    def adapt_(cls, transformer: nn.Module) -> nn.Module:
        """Modify the stock transformer in place, without changing its results, and return it."""
        return transformer

    @classmethod
    def _token_limit(cls, config: Model, name: str, tokenizer: Any) -> int:
        """Token limit: `model.max_sequence_length` for the tokenizer of the long encoder, else the tokenizer's."""
        long = name == tokenizer_of(cls.ENCODERS[-1])
        return config.max_sequence_length if long else int(tokenizer.model_max_length)

    @classmethod
    def _token_counts(cls, tokenizer: Any, texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in tokenizer(list(texts), verbose=False).input_ids]

    @classmethod
    def _open(cls, config: Model, key: str = KEY) -> Checkpoint:
        checkpoint = Checkpoint.open(config.path, config.family, cls.INDEX or cls.PIPELINE.__name__, key)
        checkpoint.check_class("transformer", (cls.TRANSFORMER.__name__,))
        return checkpoint

    @classmethod
    def _encoders(cls, checkpoint: Checkpoint) -> list[str]:
        return [name for name in cls.ENCODERS if name not in cls.OPTIONAL or checkpoint.has(name)]

    @classmethod
    def _load_text(cls, config: Model, checkpoint: Checkpoint, dtype: torch.dtype) -> TextEncoders:
        from solrl_ray.models.components import TextEncoders

        return TextEncoders(cls.PIPELINE, *cls._text_parts(config, checkpoint, dtype))

    @classmethod
    def _text_parts(
        cls, config: Model, checkpoint: Checkpoint, dtype: torch.dtype
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Name → text encoder, and name → tokenizer; None for parts that the checkpoint lacks."""
        encoders: dict[str, Any] = dict.fromkeys(cls.ENCODERS)
        tokenizers: dict[str, Any] = dict.fromkeys(map(tokenizer_of, cls.ENCODERS))
        for name in cls._encoders(checkpoint):
            encoders[name] = checkpoint.load_encoder(name, dtype)
            tokenizers[tokenizer_of(name)] = checkpoint.load_tokenizer(tokenizer_of(name))
        long = tokenizers[tokenizer_of(cls.ENCODERS[-1])]
        if long is not None and config.max_sequence_length > long.model_max_length:
            raise UserError(
                f"model.max_sequence_length is {config.max_sequence_length}, "
                f"but the tokenizer of {config.path} returns at most {long.model_max_length} tokens."
            )
        return encoders, tokenizers
