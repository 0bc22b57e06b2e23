"""Trains the moving world's video model: eleven minutes on one GPU, in several sessions if needed.

    python benchmarks/build_video_world.py OUT [--seconds 560] [--device cuda] [--scale 1.0] [--tiny]

Clips are rendered by code (`video_assets/clips.py`): two objects of the testbed that rotate about each other. A
Wan-shaped pipeline learns them. Caption words are replaced at random, so that the model stays imperfect and leaves
something for reinforcement learning to improve. Then it is trained on pairs of noise and its generated clip (rectified
flow, arXiv 2209.03003), so that a clip depends far more on the seed than on steps and precision.

The command stops after `--seconds`; run it again to continue, until it prints that all is done. OUT/state keeps its
progress. OUT/world has the results so far:

    pipeline/    a WanPipeline, bfloat16
    prompts/     train.txt, heldout.txt; the model has never seen the latter
    scores.py    the reward, and a second one to check it, as custom functions
    video.yaml   a configuration on top of the demo's: solrl train demo OUT/world/video.yaml
    build.json   time and loss of each stage, and rewards of real, restored and generated clips
    clips.png    a sheet: for some captions a real clip and the model's (before it is trained, a restored one)

Exits with status 1 if clips restored by the trained autoencoder get less than half of the real ones' reward, because
later stages would be wasted. `--scale` below 1 shortens all stages for a trial and skips this check; `--tiny` also
makes the networks tiny.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from emoji_assets.fit import Fit, Stage, Unusable, command
from emoji_assets.judgement import page
from torch import Tensor, nn
from video_assets import clips, networks, scores

from solrl_ray.config import yaml_text

AUTOENCODER = Stage(name="autoencoder", seconds=280, batch=48, lr=6e-4, seed=11, averaging=0.998)
FLOW = Stage(name="flow", seconds=240, batch=512, lr=1.2e-3, seed=12, averaging=0.9995)
RECTIFICATION = Stage(name="rectification", seconds=100, batch=768, lr=8e-4, seed=13, averaging=0.999)
CORRUPTION = 0.25
"""Share of caption words replaced: determines the gap between the model's reward and that of real clips."""
CLIPS, PAIRS, CHUNK = 1 << 16, 1 << 15, 1024
PAIR_STEPS = 20
PROMPTS = {"train": 2048, "heldout": 96}
SHOWN, SAMPLES, STEPS = 96, 4, 10
LEAST = 0.5
"""Minimum reward of restored clips, as a share of the reward of real ones."""


class Build:
    """The pipeline and the progress of its training."""

    def __init__(self, out: Path, device: torch.device, scale: float, sizes: networks.Sizes) -> None:
        self.out, self.device, self.scale, self.tiny = out, device, scale, sizes is networks.TINY
        self.folder = out / "state"
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(1)
        self.pipe = networks.pipeline(sizes)
        for part in (self.pipe.vae, *networks.trainable(self.pipe).values()):
            part.to(device).float()
        self.ids = networks.CaptionIds(self.pipe, device)
        drawn = clips.draw(sum(PROMPTS.values()), torch.Generator().manual_seed(2))
        self.heldout, self.train = drawn[: PROMPTS["heldout"]], drawn[PROMPTS["heldout"] :]
        self.train = self.train[~torch.isin(clips.meaning(self.train), clips.meaning(self.heldout))]
        self.fits: dict[str, Fit] = {}

    def run(self, until: float) -> bool:
        """Train until `time.monotonic()` is `until`. Returns True if all is done. Raises Unusable (bad autoencoder)."""
        return all(stage(until) for stage in (self.autoencoder, self.flow, self.rectification))

    # Stages: each returns True when it is done

    def autoencoder(self, until: float) -> bool:
        vae = self.pipe.vae
        fit = self._fit(AUTOENCODER, {"vae": vae})
        if not fit.done:
            vae.train()
            fit.run(lambda generator: networks.autoencoder_loss(vae, fit.stage.batch, generator), until)
        fit.use_average()
        vae.eval().requires_grad_(False)
        latents = networks.encode(self.pipe, self._real(self._drawn(self._count(CHUNK), 3), 3))
        std, mean = torch.std_mean(latents, dim=(0, 2, 3, 4))
        vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
        if fit.done and self.scale >= 1:
            self._check_restored()
        return fit.done

    def flow(self, until: float) -> bool:
        fit = self._fit(FLOW, networks.trainable(self.pipe))
        if not fit.done and time.monotonic() < until:
            shown = self._drawn(self._count(CLIPS), 4)
            shown = shown[~torch.isin(clips.meaning(shown), clips.meaning(self.heldout).to(self.device))]
            chunks = enumerate(shown.split(CHUNK))
            latents = torch.cat(
                [networks.encode(self.pipe, self._real(chunk, 5 + n)).bfloat16() for n, chunk in chunks]
            )

            def loss(generator: torch.Generator) -> Tensor:
                batch = fit.stage.batch
                rows = torch.randint(len(shown), (batch,), device=self.device, generator=generator)
                x0 = latents[rows].float()
                noise = torch.randn(x0.shape, device=self.device, generator=generator)
                ids = self.ids(clips.corrupt(shown[rows], CORRUPTION, generator))
                return networks.matching_loss(self.pipe, x0, noise, _shifted(_logit_normal(batch, generator)), ids)

            self._train(fit, loss, until)
        fit.use_average()
        return fit.done

    def rectification(self, until: float) -> bool:
        fit = self._fit(RECTIFICATION, networks.trainable(self.pipe))
        if not fit.done and time.monotonic() < until:
            pairs = self._pairs()

            def loss(generator: torch.Generator) -> Tensor:
                rows = torch.randint(len(pairs["ids"]), (fit.stage.batch,), device=self.device, generator=generator)
                t = _shifted(torch.rand(len(rows), device=self.device, generator=generator))
                x0, noise = (pairs[name][rows].float() for name in ("latents", "noise"))
                return networks.matching_loss(self.pipe, x0, noise, t, pairs["ids"][rows])

            self._train(fit, loss, until)
        fit.use_average()
        return fit.done

    # Results

    def write(self, done: bool) -> None:
        """Write OUT/world with the results so far."""
        world = self.out / "world"
        (world / "prompts").mkdir(parents=True, exist_ok=True)
        for name, rows in (("train", self.train), ("heldout", self.heldout)):
            (world / "prompts" / f"{name}.txt").write_text("".join(f"{clips.caption(row)}\n" for row in rows))
        record: dict[str, Any] = {"done": done}
        record |= {
            name: {"steps": fit.steps, "seconds": round(fit.spent, 1), "loss": fit.loss, "done": fit.done}
            for name, fit in self.fits.items()
        }
        record |= self._judged(world / "clips.png")
        parts = {name: part for name, part in self.pipe.components.items() if isinstance(part, nn.Module)}
        record["parameters"] = {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
        for part in parts.values():
            nn.Module.to(part, "cpu", torch.bfloat16)
        self.pipe.save_pretrained(world / "pipeline")
        shutil.copy(scores.__file__, world / "scores.py")
        (world / "video.yaml").write_text(yaml_text.dump(configuration(world.absolute())))
        (world / "build.json").write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record, indent=1), flush=True)

    def _check_restored(self) -> None:
        _, captions, made = self._shown()
        real, restored = (scores.as_told(videos, captions).mean().item() for videos in made.values())
        if restored < LEAST * real:
            raise Unusable(
                f"clips restored by the autoencoder have reward {restored:.3f} and real ones {real:.3f}, and later "
                f"stages need at least {LEAST * real:.3f}; give another OUT and more seconds in AUTOENCODER"
            )

    def _shown(self) -> tuple[Tensor, list[str], dict[str, Tensor]]:
        """Held-out clips, their captions, and their real and restored videos."""
        shown = self.heldout[: self._count(SHOWN)].to(self.device)
        real = self._real(shown, 6)
        made = {"real": real, "restored": networks.decode(self.pipe, networks.encode(self.pipe, real))}
        return shown, [clips.caption(row) for row in shown], made

    def _judged(self, file: Path) -> dict[str, Any]:
        shown, captions, made = self._shown()
        real = made["real"]
        if "rectification" in self.fits:
            generator = torch.Generator(self.device).manual_seed(7)
            rows = shown.repeat(SAMPLES, 1)
            noise = torch.randn(self._latent_shape(len(rows)), device=self.device, generator=generator)
            latents = networks.sample(self.pipe, self.ids(rows), noise, STEPS)
            made["model"] = networks.decode(self.pipe, latents)
        error = (made["restored"] - real).square().mean().clamp(min=1e-9)
        found: dict[str, Any] = {"psnr_db": -10 * error.log10().item()}
        for name, videos in made.items():
            score = scores.as_told(videos, captions * (len(videos) // len(captions)))
            found[name] = {"reward": score.mean().item()}
            if name == "model":
                found[name]["spread_of_a_prompt"] = score.view(-1, len(captions)).std(dim=0).mean().item()
        lines = [
            (text, videos[i].transpose(0, 1).cpu())
            for i, text in list(enumerate(captions))[:12]
            for videos in (real, made.get("model", made["restored"]))
        ]
        page(lines, file, scale=2)
        return found

    # Helpers

    def _count(self, full: int) -> int:
        return max(8, full // 256) if self.tiny else full

    def _fit(self, stage: Stage, modules: dict[str, nn.Module]) -> Fit:
        batch = max(2, stage.batch // 64) if self.tiny else stage.batch
        stage = replace(stage, seconds=stage.seconds * self.scale, batch=batch)
        self.fits[stage.name] = Fit(stage, modules, self.folder, self.device)
        return self.fits[stage.name]

    def _train(self, fit: Fit, loss: Callable[[torch.Generator], Tensor], until: float) -> None:
        parts = networks.trainable(self.pipe).values()
        for part in parts:
            part.train()
        fit.run(loss, until)
        for part in parts:
            part.eval()

    def _drawn(self, count: int, seed: int) -> Tensor:
        return clips.draw(count, torch.Generator(self.device).manual_seed(seed))

    def _real(self, rows: Tensor, seed: int) -> Tensor:
        return clips.render_clips(rows, torch.Generator(self.device).manual_seed(seed))

    def _latent_shape(self, count: int) -> tuple[int, ...]:
        return (count, self.pipe.vae.config.z_dim, 1 + (clips.FRAMES - 1) // 4, 8, 8)

    @torch.no_grad()
    def _pairs(self) -> dict[str, Tensor]:
        """Pairs of noise and the model's latents for captions it was trained on; cached in a file."""
        file = self.folder / "pairs.pt"
        if file.exists():
            loaded: dict[str, Tensor] = torch.load(file, map_location=self.device, weights_only=True)
            return loaded
        rows = self._drawn(self._count(PAIRS), 8)
        rows = rows[~torch.isin(clips.meaning(rows), clips.meaning(self.heldout).to(self.device))]
        generator = torch.Generator(self.device).manual_seed(9)
        noise = torch.randn(self._latent_shape(len(rows)), device=self.device, generator=generator)
        ids = self.ids(rows)
        chunks = zip(ids.split(CHUNK), noise.split(CHUNK), strict=True)
        latents = torch.cat([networks.sample(self.pipe, *chunk, PAIR_STEPS) for chunk in chunks])
        pairs = {"ids": ids, "noise": noise.bfloat16(), "latents": latents.bfloat16()}
        torch.save(pairs, file)
        return pairs


def configuration(world: Path) -> dict[str, Any]:
    """A run's settings on top of the demo's."""
    lora = {"rank": 16, "alpha": 32, "targets": ["to_q", "to_k", "to_v", "to_out.0"]}
    return {
        "run": {"name": "moving"},
        "model": {
            "family": "wan",
            "path": str(world / "pipeline"),
            "frames": clips.FRAMES,
            "fps": 8,
            "max_sequence_length": networks.LENGTH,
            "schedule": {"kind": "shift", "shift": networks.SHIFT},
            "lora": lora,
            "quantization": {"skip": ["condition_embedder", "^proj_out"]},
        },
        "prompts": {part: str(world / "prompts" / f"{part}.txt") for part in PROMPTS},
        "rewards": [{"kind": f"{world / 'scores.py'}:as_told"}],
        # The reward sees only the first and the last frame.
        "rollout": {"preview": {"latent_frames": [0, 2]}},
        "evaluation": {"reference": ""},
    }


def _logit_normal(count: int, generator: torch.Generator) -> Tensor:
    return torch.sigmoid(torch.randn(count, device=generator.device, generator=generator))


def _shifted(t: Tensor) -> Tensor:
    """Timesteps shifted towards high noise levels, like the sampler's grid."""
    return networks.SHIFT * t / (1 + (networks.SHIFT - 1) * t)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def build(arguments: argparse.Namespace) -> Build:
        sizes = networks.TINY if arguments.tiny else networks.FULL
        return Build(arguments.out, arguments.device, arguments.scale, sizes)

    return command(parser, build)


if __name__ == "__main__":
    raise SystemExit(main())
