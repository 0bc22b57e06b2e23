"""How well do previews rank that leave the decoder early, beside small decoders and the whole one?

    python benchmarks/early_decoding.py --work FOLDER [--prompts 16] [--seeds 96] [--decoder dc --small]

The testbed's transformer samples pools of seeds; its latents are decoded to 64 px, twice what its reward looks at, as
512 px are of 224. The testbed's own autoencoder has two up-blocks and makes 32 px, so one with three is trained for
the same latents first (`--decoder kl`, the default, like FLUX's and SD3's; `dc`, like SANA's), on the world's
pictures, and small decoders are distilled from it. Early read-outs are fitted by least squares to samples of other
prompts, as the base evaluation of a run has them (`early_exit.py`). Previews of `configs/demo.yaml`, 6 steps in float32
or emulated NVFP4, stand against 10 steps in float32 that are decoded in full; 24 of each pool are chosen.

An hour on one core. Given again with the same ``--work`` it goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderTiny
from early_exit import Where, fit, truncated
from pruned_previews import figures
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from solrl_ray import models, rewards
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.quantization.scope import quantize_
from solrl_ray.records import Prompt, PromptEmbedding, WorkUnit
from solrl_ray.rollout.sampler import Sampler
from solrl_ray.testbed.captions import draw
from solrl_ray.testbed.world import JITTERS, render

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
RESOLUTION = 64
LEVELS = 3
WIDTHS = (8, 16, 32)
"""A sixteenth of FLUX's and SD3's, from the picture's size down."""
BATCH, LEARNING_RATE = 4, 2e-3
READOUTS = {"1x1": (1, 0), "1x1 and silu": (1, 4), "3x3 and silu": (3, 4)}
"""Kernel, and groups of what is normalised and activated beside the plain features."""
PREVIEW_STEPS, FULL_STEPS, KEEP = 6, 10, 24
FIT_PROMPTS, FIT_SAMPLES = 64, 4
"""Of the base evaluation of `configs/demo.yaml`."""
EARLY: tuple[tuple[int, Where, str], ...] = (
    (4, "end", "1x1"),
    (4, "end", "1x1 and silu"),
    (2, "entry", "1x1"),
    (2, "entry", "1x1 and silu"),
    (2, "entry", "3x3 and silu"),
)
"""Where the decoder is left, and a read-out."""
Decode = Callable[[Tensor], Tensor]


def kl() -> Any:
    blocks = {"up_block_types": ("UpDecoderBlock2D",) * LEVELS, "down_block_types": ("DownEncoderBlock2D",) * LEVELS}
    plain = {"use_quant_conv": False, "use_post_quant_conv": False, "norm_num_groups": 4, "latent_channels": 4}
    return AutoencoderKL(block_out_channels=WIDTHS, layers_per_block=1, **blocks, **plain)


def dc() -> Any:
    sides: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_block_types": "ResBlock", f"{side}_block_out_channels": WIDTHS}
        sides |= {f"{side}_layers_per_block": (2,) * LEVELS, f"{side}_qkv_multiscales": ((),) * LEVELS}
    return AutoencoderDC(latent_channels=4, upsample_block_type="interpolate", downsample_block_type="Conv", **sides)


def tiny(channels: int) -> Any:
    widths, blocks = (channels,) * LEVELS, (1,) * LEVELS
    sides = {f"{side}_block_out_channels": widths for side in ("encoder", "decoder")}
    return AutoencoderTiny(num_encoder_blocks=blocks, num_decoder_blocks=blocks, latent_channels=4, **sides)


DECODERS = {"kl": kl, "dc": dc}


class Bench:
    def __init__(self, config: Config, arguments: argparse.Namespace) -> None:
        self._config, self._work, self._seeds = config, arguments.work, arguments.seeds
        self._steps, self.small_steps = arguments.train_steps, arguments.small_steps
        self.small_channels = arguments.small
        self._work.mkdir(parents=True, exist_ok=True)
        self._reward = rewards.load(config.rewards, "cpu")
        self._pool_prompts = read_prompts(config.prompts.train)[: arguments.prompts]
        self._fit_prompts = read_prompts(config.prompts.heldout)[:FIT_PROMPTS]
        self._vae: Any = models.load(config.model, "cpu", components={"vae"})

    # Latents

    def sampled(self, tier: str, steps: int) -> Tensor:
        """Of whole pools, float32 [prompts, seeds, 4, 16, 16], as the autoencoder takes them."""
        return self._samples(f"{tier}_{steps}", tier, steps, self._pool_prompts, self._seeds, "explore")

    def base_evaluation(self) -> Tensor:
        found = self._samples("evaluation", "float32", FULL_STEPS, self._fit_prompts, FIT_SAMPLES, "evaluate")
        return found.flatten(0, 1)

    def _samples(self, name: str, tier: str, steps: int, prompts: list[Prompt], seeds: int, stage: Any) -> Tensor:
        file = self._work / f"latents_{name}_{len(prompts)}_{seeds}.safetensors"
        if not file.exists():
            started = time.perf_counter()
            model = models.load(self._config.model, "cpu")
            texts = model.encode([prompt.text for prompt in prompts])
            if tier != "float32":
                quantize_(model.transformer, tier, self._config.model.quantization)
            sampler = Sampler(self._config, model, self._reward, steps=steps, micro_batch=min(seeds, 24))
            indices, pools = tuple(range(seeds)), []
            for prompt, tensors in zip(prompts, texts, strict=True):
                embedding = PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest="")
                unit = WorkUnit(stage=stage, iteration=0, revision=0, prompt_id=prompt.id, indices=indices)
                latents = sampler(unit, prompt, embedding).latents
                pools.append(model._denormalised(model.decoder, model._unpacked(latents)))
            save_file({"latents": torch.stack(pools).contiguous()}, file)
            print(f"<!-- {file.name}: {time.perf_counter() - started:.0f} s -->", flush=True)
        return load_file(file)["latents"]

    # Decoders

    def decoder(self, kind: str) -> Any:
        """Trained on the world's pictures: from latents of the testbed's encoder to pictures of 64 px."""
        autoencoder = DECODERS[kind]()

        def wanted(latents: Tensor, pictures: Tensor) -> Tensor:
            return pictures

        self._trained(kind, autoencoder, autoencoder.decoder, self._steps, wanted)
        return autoencoder

    def small(self, kind: str, channels: int, whole: Any) -> Decode:
        """Distilled from the trained one."""
        autoencoder = tiny(channels)

        def wanted(latents: Tensor, pictures: Tensor) -> Tensor:
            with torch.no_grad():
                return whole.decode(latents, return_dict=False)[0]

        self._trained(f"{kind}_small_{channels}", autoencoder, autoencoder.decoder, self.small_steps, wanted)
        return by(autoencoder)

    def early(self, whole: Any, divisor: int, where: Where, kernel: int, groups: int) -> Decode:
        """Fitted to the base evaluation."""
        latents = self.base_evaluation().split(16)
        return by(fit(whole, divisor, where, latents, kernel=kernel, groups=groups))

    def _trained(
        self, name: str, autoencoder: Any, decoder: nn.Module, steps: int, wanted: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        file = self._work / f"{name}_{steps}.safetensors"
        if not file.exists():
            torch.manual_seed(0)
            generator = torch.Generator().manual_seed(0)
            for module in decoder.modules():
                if isinstance(module, nn.Conv2d):
                    module.reset_parameters()
            optimizer = torch.optim.Adam(decoder.parameters(), LEARNING_RATE)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            started, errors = time.perf_counter(), []
            for step in range(steps):
                latents, pictures = self._world(generator)
                target = wanted(latents, pictures)
                error = autoencoder.decode(latents, return_dict=False)[0] - target
                optimizer.zero_grad()
                (error.abs().mean() + error.square().mean()).backward()
                nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                errors.append(error.detach().square().mean().item())
                if step % 100 == 99:
                    rms = float(np.mean(errors[-100:])) ** 0.5
                    seconds = time.perf_counter() - started
                    print(f"<!-- {name}: step {step + 1}, rms {rms:.3f}, {seconds:.0f} s -->", flush=True)
            save_file(decoder.state_dict(), file)
        decoder.load_state_dict(load_file(file))
        autoencoder.eval().requires_grad_(False)

    @torch.no_grad()
    def _world(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Latents of pictures of 32 px, with the encoder's noise, and the same pictures at 64 px, in [-1, 1]."""
        scenes, jitter = draw(BATCH, generator), torch.rand(BATCH, JITTERS, generator=generator)
        posterior = self._vae.decoder.encode(render(scenes, jitter) * 2 - 1).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator)
        return posterior.mean + posterior.std * noise, render(scenes, jitter, RESOLUTION) * 2 - 1

    # Scores

    @torch.no_grad()
    def scores(self, name: str, make: Callable[[], Decode], pools: Tensor) -> np.ndarray:
        """Rewards [prompts, seeds] of latents [prompts, seeds, …]. `name`: of the file that keeps them."""
        file = self._work / f"scores_{name}_{len(pools)}_{self._seeds}_{self._steps}.npy".replace("/", "-")
        if file.exists():
            return np.load(file)
        decode, rows = make(), []
        for prompt, latents in zip(self._pool_prompts, pools, strict=True):
            images = [(decode(part) / 2 + 0.5).clamp(0, 1) for part in latents.split(24)]
            rows.append(torch.cat([self._reward.score(each, [prompt.text] * len(each)) for each in images]).numpy())
        np.save(file, np.stack(rows))
        return np.stack(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to decode a preview."""

    name: str
    flops: float
    """Of an image; a read-out's own, less than a hundredth, are left out."""
    decode: Callable[[], Decode]
    """Makes it: latents to pixels in [-1, 1] of any size. Called if its scores are not known."""


def ways(bench: Bench, kind: str, whole: Any) -> Iterator[Way]:
    yield Way(name="whole", flops=flops(whole), decode=lambda: by(whole))
    halved = by(whole)
    cost = flops(whole) / 4
    yield Way(name="whole, of halved latents", flops=cost, decode=lambda: lambda z: halved(F.avg_pool2d(z, 2)))
    for divisor, where, read in EARLY:
        yield Way(
            name=f"early, 1/{divisor} {where}, {read}",
            flops=flops(truncated(whole, divisor, where)),
            decode=partial(bench.early, whole, divisor, where, *READOUTS[read]),
        )
    for channels in bench.small_channels:
        yield Way(
            name=f"small, {channels} channels, {bench.small_steps} steps",
            flops=flops(tiny(channels)),
            decode=partial(bench.small, kind, channels, whole),
        )


def by(autoencoder: Any) -> Decode:
    return lambda latents: autoencoder.decode(latents, return_dict=False)[0]


@torch.no_grad()
def flops(autoencoder: Any) -> float:
    with FlopCounterMode(display=False) as counter:
        autoencoder.decode(torch.zeros(1, 4, 16, 16))
    return float(counter.get_total_flops())


def measure(bench: Bench, kind: str) -> list[dict[str, Any]]:
    whole = bench.decoder(kind)
    tiers = {tier: bench.sampled(tier, PREVIEW_STEPS) for tier in ("float32", "nvfp4-emulated")}
    full = bench.scores(f"{kind}_full", lambda: by(whole), bench.sampled("float32", FULL_STEPS))
    rows: list[dict[str, Any]] = []
    print("| decoder | FLOP | tier | Spearman | same | contrast | kept | K = 8 |")
    print("|---|---|---|---|---|---|---|---|")
    wholes: dict[str, np.ndarray] = {}
    for way, (tier, latents) in itertools.product(ways(bench, kind, whole), tiers.items()):
        proxies = bench.scores(f"{kind}_{way.name}_{tier}", way.decode, latents)
        found = figures(proxies, np.ones(full.shape, bool), wholes.setdefault(tier, proxies), full, KEEP)
        found |= {"same": overlap(proxies, full), "flops": way.flops}
        rows.append({"decoder": way.name, "tier": tier, **found})
        share = way.flops / rows[0]["flops"]
        print(
            f"| {way.name} | {share:.2f} | {tier} | {found['spearman']:.3f} | {found['same']:.3f} "
            f"| {found['contrast']:.3f} | {found['kept']:.3f} ± {found['kept_half']:.3f} | {found['kept_8']:.3f} |",
            flush=True,
        )
    return rows


def overlap(proxies: np.ndarray, full: np.ndarray) -> float:
    """Share of the chosen that full rewards would have chosen, on the same side."""
    half, shares = KEEP // 2, []
    for x, y in zip(proxies, full, strict=True):
        mine, truth = (np.argsort(-values, kind="stable").tolist() for values in (x, y))
        shares.append(len(set(mine[:half]) & set(truth[:half])) + len(set(mine[-half:]) & set(truth[-half:])))
    return float(np.mean(shares)) / KEEP


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=96)
    parser.add_argument("--decoder", choices=DECODERS, default="kl")
    parser.add_argument("--small", type=int, nargs="*", default=[8], help="channels of small decoders")
    parser.add_argument("--train-steps", type=int, default=800)
    parser.add_argument("--small-steps", type=int, default=800)
    parser.add_argument("--work", type=Path, required=True, help="folder of what was sampled and trained")
    parser.add_argument("--only", choices=("latents", "decoder"), help="make that and stop")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(load([ROOT / "configs" / "demo.yaml"]), arguments)
    if arguments.only == "latents":
        bench.base_evaluation(), bench.sampled("float32", FULL_STEPS)
        bench.sampled("float32", PREVIEW_STEPS), bench.sampled("nvfp4-emulated", PREVIEW_STEPS)
        return
    if arguments.only == "decoder":
        whole = bench.decoder(arguments.decoder)
        for channels in bench.small_channels:
            bench.small(arguments.decoder, channels, whole)
        return
    rows = measure(bench, arguments.decoder)
    result = {"prompts": arguments.prompts, "seeds": arguments.seeds, "keep": KEEP, "torch": torch.__version__}
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"early_decoding_{arguments.decoder}.json"
    file.write_text(json.dumps(result | {"previews": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
