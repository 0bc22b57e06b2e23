"""The moving world's video model: an untrained Wan pipeline and its losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from emoji_assets.objectives import mixed
from torch import Tensor, nn
from torch.nn import functional
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel
from video_assets import clips

from solrl_ray.config.schema import SigmaSchedule
from solrl_ray.sampling import schedules, solvers
from solrl_ray.testbed.world import FIELD_VALUES

LENGTH = 24
"""Tokens per text: up to 21 words, the end token, and padding."""
SHIFT = 3.0
TIMESTEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    autoencoder: int = 16
    """Channels of the autoencoder at full resolution."""
    channels: int = 16
    """Channels of a latent; a cell covers 4 × 4 pixels of 4 frames (in the first latent frame, of 1 frame)."""
    heads: int = 4
    blocks: int = 6
    text_width: int = 96


FULL = Sizes()
"""The transformer has 1.7 million parameters, the autoencoder 1.9 million."""
TINY = Sizes(autoencoder=4, channels=4, heads=2, blocks=2, text_width=32)
"""For tests."""


def pipeline(sizes: Sizes) -> WanPipeline:
    """A pipeline in float32 on the CPU; weights depend on torch's global seed."""
    words = sorted({word for words in FIELD_VALUES for text in words for word in text.split()} | {"a", "on", "then"})
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -10.0), *((f"▁{word}", -1.0) for word in words)]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=LENGTH)
    text = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=sizes.text_width,
        d_kv=32,
        d_ff=2 * sizes.text_width,
        num_layers=2,
        num_heads=sizes.text_width // 32,
        dropout_rate=0.0,
    )
    transformer = WanTransformer3DModel(
        patch_size=(1, 1, 1),
        num_attention_heads=sizes.heads,
        attention_head_dim=32,
        in_channels=sizes.channels,
        out_channels=sizes.channels,
        text_dim=sizes.text_width,
        freq_dim=64,
        ffn_dim=4 * 32 * sizes.heads,
        num_layers=sizes.blocks,
        rope_max_seq_len=32,
    )
    vae = AutoencoderKLWan(
        base_dim=sizes.autoencoder,
        z_dim=sizes.channels,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * sizes.channels,  # both are computed after training
        latents_std=[1.0] * sizes.channels,
        scale_factor_temporal=4,
        scale_factor_spatial=4,
    )
    _begin(vae)
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(text),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        transformer=transformer,
    )


@torch.no_grad()
def _begin(vae: AutoencoderKLWan) -> None:
    """Initialise the autoencoder near a linear map that preserves the scale of signals, with little noise on latents.

    With torch's default initialisation, signals shrink until biases dominate. Then the norm over a pixel's channels
    maps white and grey to the same latent for hundreds of steps, and colours are learned last.
    """
    for name, module in vae.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Conv3d):
            continue
        if name.endswith(("conv2", "proj")):  # the ends of residual branches
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
        else:
            module.weight.mul_(3**0.5)  # torch's is uniform, of variance 1 / (3 inputs)
    vae.quant_conv.bias[vae.config.z_dim :].sub_(6.0)  # the bias of the log-variance


def trainable(pipe: WanPipeline) -> dict[str, nn.Module]:
    """The modules trained by flow matching."""
    return {"transformer": pipe.transformer, "text_encoder": pipe.text_encoder}


def tokens(pipe: WanPipeline, texts: Sequence[str]) -> Tensor:
    """Token ids, int64 [B, LENGTH]; 0 is padding."""
    ids: Tensor = pipe.tokenizer(list(texts), padding="max_length", max_length=LENGTH, return_tensors="pt").input_ids
    return ids


class CaptionIds:
    """Computes `tokens` of the captions of clips, int64 [B, 10], by table lookup on their device. The tokenizer would
    take longer for a batch than its training step.
    """

    def __init__(self, pipe: WanPipeline, device: torch.device) -> None:
        size, colour, shape, relation, *second, background = FIELD_VALUES
        first_object = ((("a",), None), (size, 1), (colour, 2), (shape, 3))
        second_object = ((("a",), None), *zip(second, (5, 6, 7), strict=True))
        end = ((("then",), None), (relation, 9), (("on",), None), (background, 8))
        pieces = (*first_object, (relation, 4), *second_object, *end)
        self._columns = [column for _, column in pieces]
        self._tables = [_table(pipe.tokenizer, texts).to(device) for texts, _ in pieces]
        self._end: int = pipe.tokenizer.eos_token_id

    def __call__(self, rows: Tensor) -> Tensor:
        """The result of `tokens` for the captions of `rows`, on their device."""
        none = torch.zeros_like(rows[:, 0])
        choices = [none if column is None else rows[:, column] for column in self._columns]
        ids = torch.cat([table[which] for table, which in zip(self._tables, choices, strict=True)], dim=1)
        ids = functional.pad(functional.pad(ids, (0, 1), value=self._end), (0, LENGTH - ids.shape[1] - 1))
        return ids.gather(1, (ids == 0).long().argsort(dim=1, stable=True))  # relations of one word leave a gap


def _table(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Token ids [texts, most words of a text], padded with 0."""
    ids = [torch.tensor(tokenizer.convert_tokens_to_ids([f"▁{word}" for word in text.split()])) for text in texts]
    return nn.utils.rnn.pad_sequence(ids, batch_first=True)


def encode_texts(pipe: WanPipeline, ids: Tensor) -> Tensor:
    """The result of the pipeline's ``encode_prompt``, with zeros for padding: [B, LENGTH, width]."""
    mask = ids != 0
    states: Tensor = pipe.text_encoder(ids, mask.long()).last_hidden_state
    return states * mask[..., None]


def velocity(pipe: WanPipeline, x_t: Tensor, t: Tensor, states: Tensor) -> Tensor:
    """The velocity, float32, shape as `x_t` [B, channels, T, H, W]; t: [B] in [0, 1]."""
    found: Tensor = pipe.transformer(x_t, timestep=t * TIMESTEPS, encoder_hidden_states=states, return_dict=False)[0]
    return found.float()


def autoencoder_loss(vae: Any, batch: int, generator: torch.Generator) -> Tensor:
    return restored_loss(vae, clips.render_clips(clips.draw(batch, generator), generator) * 2 - 1, generator)


def restored_loss(vae: Any, seen: Tensor, generator: torch.Generator) -> Tensor:
    """The autoencoder's loss on videos in [-1, 1]."""
    with mixed(seen.device):
        posterior = vae.encode(seen).latent_dist
        # Train the decoder also on slightly wrong latents, like those of a sampler.
        noise = torch.randn(posterior.mean.shape, device=seen.device, generator=generator)
        restored = vae.decode(posterior.mean + posterior.std * noise).sample.float()
    error = restored - seen
    divergence = posterior.kl().mean() / posterior.mean[0].numel()
    return error.abs().mean() + error.square().mean() + 1e-3 * divergence


def matching_loss(pipe: WanPipeline, x0: Tensor, noise: Tensor, t: Tensor, ids: Tensor) -> Tensor:
    """Flow matching: x_t = (1 - t) x0 + t noise, whose velocity is noise - x0."""
    x_t = torch.lerp(x0, noise, t[:, None, None, None, None])
    with mixed(x0.device):
        found = velocity(pipe, x_t, t, encode_texts(pipe, ids))
    return (found - (noise - x0)).square().mean()


@torch.no_grad()
def encode(pipe: WanPipeline, videos: Tensor) -> Tensor:
    """Encode videos in [0, 1] to normalised latents, float32 [B, channels, T, H, W]."""
    with mixed(videos.device):
        latents = pipe.vae.encode(videos * 2 - 1).latent_dist.mean.float()
    mean, std = _statistics(pipe, latents)
    return (latents - mean) / std


@torch.no_grad()
def decode(pipe: WanPipeline, latents: Tensor) -> Tensor:
    """Decode normalised latents to videos, float32 in [0, 1]."""
    mean, std = _statistics(pipe, latents)
    with mixed(latents.device):
        videos = pipe.vae.decode(latents * std + mean).sample
    return (videos.float() / 2 + 0.5).clamp(0, 1)


@torch.no_grad()
def sample(pipe: WanPipeline, ids: Tensor, noise: Tensor, steps: int) -> Tensor:
    """Sample latents for texts with Euler's method, shape as `noise`."""
    grid = schedules.sigmas(SigmaSchedule(kind="shift", shift=SHIFT), steps, noise[0, 0].numel())
    with mixed(noise.device):
        states = encode_texts(pipe, ids)

    def field(x: Tensor, sigma: float) -> Tensor:
        with mixed(x.device):
            return velocity(pipe, x, x.new_full((len(x),), sigma), states)

    return solvers.advance(field, solvers.SolverState(noise), grid, "euler").latents


def _statistics(pipe: WanPipeline, latents: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = (
        latents.new_tensor(pipe.vae.config[f"latents_{name}"])[:, None, None, None] for name in ("mean", "std")
    )
    return mean, std
