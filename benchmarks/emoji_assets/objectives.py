"""The losses of the stages: autoencoder, CLIP, flow matching and rectification.

x_t = (1 - t) x0 + t noise; the velocity's target is noise - x0; the timestep is t in [0, 1].

*Rectification* (rectified flow, arXiv 2209.03003): the model is trained on pairs of noise and the image that it
generates from it with classifier-free guidance. It then generates the same images without guidance in few steps, and an
image depends more on its seed than on steps and precision, as with FLUX.1-dev.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FluxPipeline
from emoji_assets.pictures import World, as_floats, moved
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPModel

from solrl_ray.config.schema import SigmaSchedule
from solrl_ray.sampling import schedules, solvers

TEMPERATURE = 20.0
"""Temperature of CLIP's logits; fixed, so that near misses differ in cosine and not only in a large logit."""
UNSAID = 0.1
"""Share of captions that are empty, for guidance."""
SCHEDULE = SigmaSchedule(kind="flux")


def mixed(device: torch.device) -> torch.autocast:
    """Autocast on GPUs: matrix products and convolutions in bfloat16, weights in float32. Off on CPUs: it is slow."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def autoencoder_loss(vae: Any, pictures: World, batch: int, generator: torch.Generator) -> Tensor:
    device = pictures.pixels.device
    rows = torch.randint(len(pictures), (batch,), device=device, generator=generator)
    seen = moved(as_floats(pictures.pixels[rows]), pictures.mirrors[rows], generator)
    with mixed(device):
        posterior = vae.encode(seen).latent_dist
        # Train the decoder also on slightly wrong latents, like those of a sampler.
        noise = torch.randn(posterior.mean.shape, device=device, generator=generator)
        restored = vae.decode(posterior.mean + posterior.std * noise).sample.float()
    error = restored - seen
    edges = (error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()) / 2
    divergence = posterior.kl().mean() / posterior.mean[0].numel()
    return error.abs().mean() + error.square().mean() + edges + 1e-3 * divergence


def image_features(model: CLIPModel, pictures: Tensor) -> Tensor:
    """Unit-length image features [B, 64] of images in [0, 1]."""
    return functional.normalize(model.get_image_features(pixel_values=pictures * 2 - 1).pooler_output.float(), dim=-1)


def text_features(model: CLIPModel, ids: Tensor) -> Tensor:
    """Unit-length text features [B, 64] of token ids [B, 16]."""
    return functional.normalize(model.get_text_features(input_ids=ids).pooler_output.float(), dim=-1)


def weathered(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Slight noise, blur and change of brightness, so that the reward depends on content, not on pixels."""
    size, device = len(pictures), pictures.device
    blurred = functional.avg_pool2d(functional.pad(pictures, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    amount = torch.rand(size, 3, 1, 1, 1, device=device, generator=generator)
    pictures = torch.lerp(pictures, blurred, (2 * amount[:, 0] - 1).clamp(min=0))
    noise = torch.randn(pictures.shape, device=device, generator=generator)
    brightness = 1 + 0.2 * (amount[:, 2] - 0.5)
    return (pictures * brightness + 0.06 * amount[:, 1] * noise).clamp(0, 1)


def clip_loss(model: Any, pictures: World, restored: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    """In-batch contrastive loss. Half of the images are `restored` by the autoencoder (uint8, like ``pixels``), because
    a model's images are decoded by it, too. Double exposures are added as images that match no caption. Pairs that
    match by chance are ignored, such as another style's image of the concept if the caption names no style.
    """
    device = pictures.pixels.device
    rows = torch.randint(len(pictures), (batch,), device=device, generator=generator)
    variants = torch.randint(pictures.texts.clip.shape[1], (batch,), device=device, generator=generator)
    use_restored = torch.rand(batch, device=device, generator=generator) < 0.5
    pixels = torch.where(use_restored[:, None, None, None], restored[rows], pictures.pixels[rows])
    seen = moved(as_floats(pixels), pictures.mirrors[rows], generator) / 2 + 0.5
    weight = 0.3 + 0.4 * torch.rand(batch // 2, 1, 1, 1, device=device, generator=generator)
    doubles = torch.lerp(seen[: batch // 2], seen[-(batch // 2) :].flip(0), weight)
    with mixed(device):
        images = image_features(model, weathered(torch.cat([seen, doubles]), generator))
        texts = text_features(model, pictures.texts.clip[rows, variants])
    logits = TEMPERATURE * texts @ images.T
    unclear = _also_right(pictures, rows, pictures.texts.says_style[rows, variants])
    logits[:, :batch].masked_fill_(unclear, -1e4)
    target = torch.arange(batch, device=device)
    return functional.cross_entropy(logits, target) + functional.cross_entropy(logits[:, :batch].T, target)


def _also_right(pictures: World, rows: Tensor, says_style: Tensor) -> Tensor:
    """bool [B, B]: caption i also fits image j ≠ i."""

    def same(values: Tensor) -> Tensor:
        return values[rows][:, None] == values[rows][None, :]

    fits = same(pictures.names) & same(pictures.tones) & (same(pictures.styles) | ~says_style[:, None])
    return fits.fill_diagonal_(False)


@dataclass(frozen=True, slots=True)
class Latents:
    """V latents of each of N images, shifted and mirrored: bfloat16 [N, V, tokens, channels]."""

    values: Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """Noise and the latents generated from it, bfloat16 [M, tokens, channels], with token ids of the text, int64
    [M, length]."""

    noise: Tensor
    latents: Tensor
    clip: Tensor
    t5: Tensor


def flow_loss(
    pipe: FluxPipeline,
    pictures: World,
    latents: Latents,
    batch: int,
    empty: tuple[Tensor, Tensor],
    generator: torch.Generator,
) -> Tensor:
    """Flow matching loss. `empty`: ids of the empty text by both tokenizers, int64 [length]."""
    device = latents.values.device
    rows = torch.randint(len(pictures), (batch,), device=device, generator=generator)
    which = torch.randint(latents.values.shape[1], (batch,), device=device, generator=generator)
    variants = torch.randint(pictures.texts.clip.shape[1], (batch,), device=device, generator=generator)
    unsaid = (torch.rand(batch, device=device, generator=generator) < UNSAID)[:, None]
    clip = torch.where(unsaid, empty[0], pictures.texts.clip[rows, variants])
    t5 = torch.where(unsaid, empty[1], pictures.texts.t5[rows, variants])
    x0 = latents.values[rows, which].float()
    noise = torch.randn(x0.shape, device=device, generator=generator)
    return _matching(pipe, x0, noise, _logit_normal(batch, generator), clip, t5)


def rectification_loss(pipe: FluxPipeline, pairs: Pairs, batch: int, generator: torch.Generator) -> Tensor:
    device = pairs.noise.device
    rows = torch.randint(len(pairs.noise), (batch,), device=device, generator=generator)
    t = torch.rand(batch, device=device, generator=generator)
    (shift,) = schedules.sigmas(SCHEDULE, 2, pairs.noise.shape[1])[1:2].tolist()
    # A continuous version of the sampler's grid, whose middle of two steps is at `shift`.
    t = shift * t / (1 - shift + (2 * shift - 1) * t)
    return _matching(pipe, pairs.latents[rows].float(), pairs.noise[rows].float(), t, pairs.clip[rows], pairs.t5[rows])


def _matching(pipe: FluxPipeline, x0: Tensor, noise: Tensor, t: Tensor, clip: Tensor, t5: Tensor) -> Tensor:
    x_t = torch.lerp(x0, noise, t[:, None, None])
    with mixed(x0.device):
        found = velocity(pipe, x_t, t, *encode_texts(pipe, clip, t5))
    return (found - (noise - x0)).square().mean()


def encode_texts(pipe: FluxPipeline, clip: Tensor, t5: Tensor) -> tuple[Tensor, Tensor]:
    """The result of `FluxPipeline.encode_prompt`: [B, length, width] and [B, width]."""
    return pipe.text_encoder_2(t5)[0], pipe.text_encoder(clip).pooler_output


def velocity(pipe: FluxPipeline, x_t: Tensor, t: Tensor, sequence: Tensor, pooled: Tensor) -> Tensor:
    side = round(x_t.shape[1] ** 0.5)
    found: Tensor = pipe.transformer(
        hidden_states=x_t,
        encoder_hidden_states=sequence,
        pooled_projections=pooled,
        timestep=t,
        img_ids=pipe._prepare_latent_image_ids(1, side, side, x_t.device, torch.float32),
        txt_ids=torch.zeros(sequence.shape[1], 3, device=x_t.device),
        return_dict=False,
    )[0]
    return found.float()


@torch.no_grad()
def sample(
    pipe: FluxPipeline,
    clip: Tensor,
    t5: Tensor,
    noise: Tensor,
    *,
    steps: int,
    guidance: float = 1.0,
    empty: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Sample latents for texts with Euler's method, shape as `noise`; with `empty`, guided away from that text."""
    grid = schedules.sigmas(SCHEDULE, steps, noise.shape[1])
    with mixed(noise.device):
        sequence, pooled = encode_texts(pipe, clip, t5)
        if empty is not None:
            bare = encode_texts(pipe, empty[0][None], empty[1][None])
            sequence = torch.cat([sequence, bare[0].expand_as(sequence)])
            pooled = torch.cat([pooled, bare[1].expand_as(pooled)])

    def field(x: Tensor, sigma: float) -> Tensor:
        copies = len(sequence) // len(x)
        x = x.repeat(copies, 1, 1)
        with mixed(x.device):
            found = velocity(pipe, x, x.new_full((len(x),), sigma), sequence, pooled)
        if copies == 1:
            return found
        conditional, unconditional = found.chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    return solvers.advance(field, solvers.SolverState(noise), grid, "euler").latents


@torch.no_grad()
def decode(pipe: FluxPipeline, latents: Tensor) -> Tensor:
    """Decode packed latents to images, float32 in [0, 1]."""
    vae, side = pipe.vae, round(latents.shape[1] ** 0.5)
    unpacked = pipe._unpack_latents(
        latents, side * 2 * pipe.vae_scale_factor, side * 2 * pipe.vae_scale_factor, pipe.vae_scale_factor
    )
    with mixed(latents.device):
        pictures = vae.decode(unpacked / vae.config.scaling_factor + vae.config.shift_factor).sample
    return (pictures.float() / 2 + 0.5).clamp(0, 1)


@torch.no_grad()
def encode(pipe: FluxPipeline, pictures: Tensor) -> Tensor:
    """Encode images in [-1, 1] to packed latents, float32 [B, tokens, channels]."""
    vae = pipe.vae
    with mixed(pictures.device):
        latent = vae.encode(pictures).latent_dist.mean.float()
    latent = (latent - vae.config.shift_factor) * vae.config.scaling_factor
    packed: Tensor = pipe._pack_latents(latent, *latent.shape)
    return packed


def _logit_normal(count: int, generator: torch.Generator) -> Tensor:
    """Random timesteps around the middle of the sampler's grid; a tenth of them are uniform."""
    device = generator.device
    normal = torch.sigmoid(0.48 + torch.randn(count, device=device, generator=generator))
    uniform, choice = torch.rand(2, count, device=device, generator=generator)
    return torch.where(choice < 0.1, uniform, normal)


def trainable(pipe: FluxPipeline) -> dict[str, nn.Module]:
    """The modules trained by flow matching."""
    return {name: getattr(pipe, name) for name in ("transformer", "text_encoder", "text_encoder_2")}
