"""The FLUX family, through the parts of a diffusers `FluxPipeline` checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import AutoencoderKL, AutoencoderTiny, FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn

from solrl_ray.config.schema import Model
from solrl_ray.errors import UserError
from solrl_ray.models import paths
from solrl_ray.models.base import DTYPES, Component, DiffusionModel

KEY = "model.path"
PIPELINE_CLASS = "FluxPipeline"
PATCH = 2
"""The transformer sees 2x2 patches of the VAE's latent as tokens."""
MAX_SEQUENCE_LENGTH = 512
"""Limit of `FluxPipeline.check_inputs`."""
VAE_CLASSES: dict[str, Any] = {"AutoencoderKL": AutoencoderKL, "AutoencoderTiny": AutoencoderTiny}


class TextEncoders(nn.Module):
    """CLIP (pooled) and T5 (sequence), used through stock `FluxPipeline.encode_prompt`."""

    def __init__(self, pipeline: Any, identity: dict[str, str]) -> None:
        super().__init__()
        self.clip = pipeline.text_encoder
        self.t5 = pipeline.text_encoder_2
        self.pipeline = pipeline
        self.identity = identity


class Flux(DiffusionModel):
    """Latents are packed as in `FluxPipeline`: [B, tokens, channels], a token is a 2x2 patch, row by row."""

    def __init__(
        self,
        config: Model,
        device: torch.device | str,
        modules: dict[Component, nn.Module],
        *,
        transformer_config: dict[str, Any],
        vae_config: dict[str, Any],
    ) -> None:
        super().__init__(config, device, modules)
        self._grid = config.resolution // (_vae_factor(vae_config) * PATCH)
        """Tokens a side."""
        self.image_tokens = self._grid**2
        self.latent_shape = (self.image_tokens, int(transformer_config["in_channels"]))
        self._guided = bool(transformer_config.get("guidance_embeds", False))
        self._scaling = float(vae_config["scaling_factor"])
        # A VAE without shift has the key absent or null.
        self._shift = float(vae_config.get("shift_factor") or 0.0)
        self._image_ids = image_ids(self._grid, self._grid).to(self.device)

    @classmethod
    def load(cls, config: Model, device: torch.device | str, components: Collection[Component]) -> Flux:
        """Load `components`; see `models.load`."""
        source = paths.checkpoint(config.path, KEY)
        index = paths.read_json(source, "model_index.json", KEY)
        if index.get("_class_name") != PIPELINE_CLASS:
            raise UserError(
                f"{KEY} is {config.path!r}, a checkpoint of {index.get('_class_name')!r}, "
                f"but model.family 'flux' needs one of {PIPELINE_CLASS!r}."
            )
        transformer_config = paths.read_json(source, "transformer/config.json", KEY)
        vae_config = paths.read_json(source, "vae/config.json", KEY)
        _check_sizes(config, vae_config)
        dtype = DTYPES[config.dtype]
        modules: dict[Component, nn.Module] = {}
        if "text" in components:
            modules["text"] = _load_text(config, source, index, dtype)
        if "transformer" in components:
            modules["transformer"] = _load_part(source, FluxTransformer2DModel, "transformer", dtype)
        if "vae" in components:
            modules["vae"] = _load_part(source, _vae_class(config, index), "vae", dtype)
        for module in modules.values():
            module.to(device)
        return cls(config, device, modules, transformer_config=transformer_config, vae_config=vae_config)

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> list[dict[str, Tensor]]:
        """``prompt_embeds`` [max_sequence_length, width], ``pooled_prompt_embeds`` [width] for each text."""
        encoders = self._text()
        embeddings = []
        for text in texts:
            sequence, pooled, _ = encoders.pipeline.encode_prompt(
                text, device=self.device, max_sequence_length=self.config.max_sequence_length
            )
            embedding = {"prompt_embeds": sequence[0], "pooled_prompt_embeds": pooled[0]}
            embeddings.append({name: tensor.to("cpu", self.dtype) for name, tensor in embedding.items()})
        return embeddings

    def text_identity(self) -> dict[str, str]:
        threads = torch.get_num_threads() if self.device.type == "cpu" else 0
        return {
            **self._text().identity,
            "max_sequence_length": str(self.config.max_sequence_length),
            "dtype": self.config.dtype,
            "device": f"{self.device.type}/{threads}",
            "libraries": f"torch {torch.__version__}, transformers {transformers.__version__}",
        }

    def velocity(self, latents: Tensor, sigma: float | Tensor, embedding: dict[str, Tensor]) -> Tensor:
        batch = latents.shape[0]
        if latents.shape[1:] != self.latent_shape:
            raise ValueError(f"latents are {tuple(latents.shape)}, not [B, {self.image_tokens}, channels]")
        sigmas = torch.as_tensor(sigma, dtype=torch.float32, device=self.device).expand(batch)
        sequence = embedding["prompt_embeds"]
        guidance = None
        if self._guided:
            guidance = torch.full((batch,), self.config.guidance, dtype=torch.float32, device=self.device)
        velocity = self.transformer(
            hidden_states=latents.to(device=self.device, dtype=self.dtype),
            # As in FluxPipeline the network sees the sigma rounded to its own dtype.
            timestep=sigmas.to(self.dtype),
            guidance=guidance,
            pooled_projections=embedding["pooled_prompt_embeds"].expand(batch, -1),
            encoder_hidden_states=sequence.expand(batch, -1, -1),
            txt_ids=torch.zeros(sequence.shape[1], 3, device=self.device),
            img_ids=self._image_ids,
            return_dict=False,
        )[0]
        return velocity.float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self._module("vae")
        z = unpack(latents.to(self.device, torch.float32), self._grid, self._grid)
        z = z / self._scaling + self._shift
        images = vae.decode(z.to(self.dtype), return_dict=False)[0]  # type: ignore[operator]
        return (images.float() / 2 + 0.5).clamp(0, 1)

    def _text(self) -> TextEncoders:
        encoders = self._module("text")
        assert isinstance(encoders, TextEncoders)
        return encoders


def pack(latents: Tensor) -> Tensor:
    """[B, C, H, W] to tokens [B, H/2 * W/2, 4C]; the inverse of `unpack`."""
    batch, channels, height, width = latents.shape
    patches = latents.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH**2)


def unpack(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """Tokens [B, rows * columns, 4C] to [B, C, 2 rows, 2 columns]."""
    batch, _, width = tokens.shape
    channels = width // PATCH**2
    patches = tokens.reshape(batch, rows, columns, channels, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, rows * PATCH, columns * PATCH)


def image_ids(rows: int, columns: int) -> Tensor:
    """Position ids of the rotary embedding, float32 [rows * columns, 3]: (0, row, column)."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], dim=-1).reshape(-1, 3).float()


def _vae_factor(vae_config: dict[str, Any]) -> int:
    """Pixels per latent cell and side, as `FluxPipeline.__init__` works it out."""
    return 2 ** (len(vae_config["block_out_channels"]) - 1)


def _check_sizes(config: Model, vae_config: dict[str, Any]) -> None:
    step = _vae_factor(vae_config) * PATCH
    if config.resolution % step:
        raise UserError(f"model.resolution is {config.resolution}, but {config.path} needs a multiple of {step}.")
    if config.max_sequence_length > MAX_SEQUENCE_LENGTH:
        raise UserError(
            f"model.max_sequence_length is {config.max_sequence_length}, but FLUX takes at most {MAX_SEQUENCE_LENGTH}."
        )


def _vae_class(config: Model, index: dict[str, Any]) -> Any:
    name = (index.get("vae") or [None, None])[1]
    if name not in VAE_CLASSES:
        raise UserError(
            f"{KEY} is {config.path!r}, whose VAE is a {name!r}; supported are {', '.join(sorted(VAE_CLASSES))}."
        )
    return VAE_CLASSES[name]


def _load_part(source: Path | str, part_class: Any, part: str, dtype: torch.dtype) -> nn.Module:
    """Load the weights of one subfolder in `dtype`."""
    keyword = "torch_dtype" if part_class.__module__.startswith("diffusers.") else "dtype"
    return paths.load_weights(part_class, source, KEY, subfolder=part, **{keyword: dtype})


def _load_text(config: Model, source: Path | str, index: dict[str, Any], dtype: torch.dtype) -> TextEncoders:
    loaded: dict[str, Any] = {}
    for part in ("text_encoder", "text_encoder_2"):
        loaded[part] = _load_part(source, getattr(transformers, index[part][1]), part, dtype)
    for part in ("tokenizer", "tokenizer_2"):
        tokenizer_class = getattr(transformers, index[part][1])
        loaded[part] = paths.load_tokenizer(tokenizer_class, source, KEY, subfolder=part)
    longest = loaded["tokenizer_2"].model_max_length
    if config.max_sequence_length > longest:
        raise UserError(
            f"model.max_sequence_length is {config.max_sequence_length}, "
            f"but the tokenizer of {config.path} makes at most {longest} tokens."
        )
    pipeline = FluxPipeline(scheduler=None, vae=None, transformer=None, **loaded)
    return TextEncoders(pipeline, {part: _fingerprint(loaded[part]) for part in loaded})


def _fingerprint(part: Any) -> str:
    """SHA-256 over what a text encoder (configuration, all weights) or a tokenizer computes with.

    Reads every weight once: seconds for T5-XXL, of the order of loading it.
    """
    digest = hashlib.sha256()
    if not hasattr(part, "state_dict"):
        digest.update(part.backend_tokenizer.to_str().encode())
        digest.update(str(part.model_max_length).encode())
        return digest.hexdigest()
    settings = {name: value for name, value in part.config.to_dict().items() if not name.startswith("_")}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, weight in sorted(part.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
