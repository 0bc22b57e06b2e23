"""Trains the networks of the emoji example: autoencoder, CLIPs of reward and judge, transformer. Trains for 14 minutes.

    python benchmarks/build_emoji.py IMAGES OUT [--seconds 540] [--device cuda] [--scale 1.0] [--tiny]

IMAGES is the folder written by `draw_emoji.py draw`. The command stops after `--seconds`, in any stage; run it again to
continue, until it prints that all is done. OUT/state keeps its progress. OUT/world has the results so far:

    pipeline/      a FluxPipeline, bfloat16, 31 million parameters in its transformer
    reward/        a CLIP trained on one half of the images: a checkpoint of kind ``clipscore``
    judge/         another, trained on the other half
    prompts/       train.txt, heldout.txt: concepts that all networks are trained on; unseen.txt: the other concepts
    build.json     time and loss of each stage, the share of images that the CLIPs recognise, and the mean `reward` and
                   `judge` of the first held-out prompts, for the model's images (`model`) and for `real` ones; in
                   `look` the same scores for the example's style, with `real` images of its set
    pictures/      sheets of real and restored images, and of the model's for known and for held-out concepts

Exits with status 1 if the trained autoencoder restores known images with less than 20 dB, because later stages would be
wasted. `--scale` below 1 shortens all stages for a trial and skips this check; `--tiny` also makes the networks tiny
and needs IMAGES from `draw_emoji.py draw --size 32`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from emoji_assets import captions, networks, objectives, pictures, tokenizers
from emoji_assets.fit import Fit, Stage, Unusable, command
from emoji_assets.judgement import SHOWN, Judgement, psnr
from emoji_assets.objectives import Latents, Pairs
from torch import Tensor, nn

AUTOENCODER = Stage(name="autoencoder", seconds=90, batch=96, lr=1e-3, seed=11, averaging=0.998)
REWARD = Stage(name="reward", seconds=45, batch=1024, lr=6e-4, seed=12, averaging=0.995, weight_decay=0.1)
JUDGE = replace(REWARD, name="judge", seed=13)
FLOW = Stage(name="flow", seconds=480, batch=512, lr=6e-4, seed=14, averaging=0.9995)
RECTIFICATION = Stage(name="rectification", seconds=150, batch=512, lr=4e-4, seed=15, averaging=0.999)
PAIRS = 40960
PAIR_CHUNK = 1024
PAIR_STEPS = 16
GUIDANCE = 2.5
VIEWS = 8
"""Encoded variants of each image, shifted and mirrored."""
LAST_SECONDS = 40.0
"""Part of --seconds reserved for writing the results."""
COMPILE_SECONDS = 45.0
"""Minimum time left to begin a stage on a GPU: its first step takes this long."""
LEAST_PSNR = 20.0
"""Minimum PSNR of known images restored by the autoencoder, in dB."""
HELD_OUT = 512
"""Prompts of known concepts that runs do not train on. The CLIPs are unreliable on other concepts."""
STAGES = (AUTOENCODER, REWARD, JUDGE, FLOW, RECTIFICATION)
EXAMPLE = Path(__file__).parents[1] / "examples" / "emoji" / "emoji.yaml"
LOOK = EXAMPLE.with_name("style.py")


class Build:
    """All networks and the progress of their training."""

    def __init__(self, data: Path, out: Path, device: torch.device, scale: float, sizes: networks.Sizes) -> None:
        self.out, self.device, self.scale, self.sizes = out, device, scale, sizes
        self.folder = out / "state"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.all_parts = captions.read(data)
        self.all_pixels = pictures.load_pixels(data, self.all_parts, sizes.resolution)
        self.rows = [row for row, each in enumerate(self.all_parts) if not each.held_out]
        known = [self.all_parts[row] for row in self.rows]
        texts = [
            captions.draw(each, generator).text
            for generator in [np.random.default_rng(5)]
            for each in known
            for _ in range(4)
        ]
        texts += [each.prompt for each in known]
        self.tokenizers = (
            tokenizers.clip_tokenizer(texts, sizes.tokens, sizes.length),
            tokenizers.t5_tokenizer(texts, sizes.tokens, sizes.length),
        )
        torch.manual_seed(1)
        self.pipe = networks.pipeline(sizes, *self.tokenizers)
        self.clips = {name: networks.clip(sizes, self.tokenizers[0]) for name in ("reward", "judge")}
        for part in (self.pipe.vae, *objectives.trainable(self.pipe).values(), *self.clips.values()):
            part.to(device).float()
        self.world = self._world(self.rows)
        clip_empty, t5_empty = (pictures.token_ids(each, [""], device)[0] for each in self.tokenizers)
        self.empty = (clip_empty, t5_empty)
        self.fits = {
            stage.name: Fit(self._scaled(stage), modules, self.folder, device)
            for stage, modules in (
                (AUTOENCODER, {"vae": self.pipe.vae}),
                (REWARD, {"clip": self.clips["reward"]}),
                (JUDGE, {"clip": self.clips["judge"]}),
            )
        }

    def run(self, until: float) -> bool:
        """Train until `time.monotonic()` is `until`. Returns True if all is done. Raises Unusable (bad autoencoder)."""
        return all(getattr(self, stage.name)(until) for stage in STAGES)

    # Stages: each returns True when it is done

    def autoencoder(self, until: float) -> bool:
        fit, vae = self.fits["autoencoder"], self.pipe.vae
        if not fit.done:
            self._compile(vae.encoder, vae.decoder)
            vae.train()
            fit.run(lambda generator: objectives.autoencoder_loss(vae, self.world, fit.stage.batch, generator), until)
        fit.use_average()
        vae.eval().requires_grad_(False)
        self._scale_latents()
        if fit.done and self.scale >= 1:
            self._check_restored()
        return fit.done

    def reward(self, until: float) -> bool:
        return self._clip("reward", until)

    def judge(self, until: float) -> bool:
        return self._clip("judge", until)

    def flow(self, until: float) -> bool:
        fit = self._flow_fit(FLOW)
        if not fit.done and self._may_begin(until):
            latents = self._latents()
            self._train_flow(
                fit,
                lambda generator: objectives.flow_loss(
                    self.pipe, self.world, latents, fit.stage.batch, self.empty, generator
                ),
                until,
            )
        fit.use_average()
        return fit.done

    def rectification(self, until: float) -> bool:
        pairs = self._pairs(until) if self._may_begin(until) else None
        if pairs is None or not self._may_begin(until):
            return False
        fit = self._flow_fit(RECTIFICATION)
        if not fit.done:
            self._train_flow(
                fit,
                lambda generator: objectives.rectification_loss(self.pipe, pairs, fit.stage.batch, generator),
                until,
            )
        fit.use_average()
        return fit.done

    # Results

    def write(self, done: bool) -> None:
        """Write OUT/world with the results so far."""
        world = self.out / "world"
        sizes = {"resolution": self.sizes.resolution, "max_sequence_length": self.sizes.length}
        record: dict[str, Any] = {"done": done, "sizes": sizes}
        record |= {
            name: {"steps": fit.steps, "seconds": round(fit.spent, 1), "loss": fit.loss, "done": fit.done}
            for name, fit in self.fits.items()
        }
        (world / "prompts").mkdir(parents=True, exist_ok=True)
        for name, prompts in self._prompts().items():
            (world / "prompts" / f"{name}.txt").write_text("\n".join(prompts) + "\n")
        with _eager():
            judgement = Judgement(
                pipe=self.pipe if "flow" in self.fits else None,
                clips=self.clips,
                tokenizer=self.tokenizers[0],
                parts=self.all_parts,
                pixels=self.all_pixels,
                restore=self._restore,
                device=self.device,
            )
            record |= judgement.of_concepts(world / "pictures") | judgement.of_prompts(self._prompts()["heldout"])
        record["parameters"] = {name: _count(part) for name, part in self._parts().items()}
        for name, part in self._parts().items():
            if name in self.clips:
                networks.save_clip(part, self.tokenizers[0], world / name)
            else:
                part.to("cpu", torch.bfloat16)
        self.pipe.save_pretrained(world / "pipeline")
        (world / "build.json").write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record, indent=1), flush=True)

    def _prompts(self) -> dict[str, list[str]]:
        known, unseen = (captions.prompts(self.all_parts, held_out, seed=3) for held_out in (False, True))
        first = min(HELD_OUT, len(known) // 4)
        return {"heldout": known[:first], "train": known[first:], "unseen": unseen}

    # Helpers

    def _may_begin(self, until: float) -> bool:
        return time.monotonic() < until - COMPILE_SECONDS * (self.device.type == "cuda")

    def _world(self, rows: list[int]) -> pictures.World:
        parts = [self.all_parts[row] for row in rows]
        return pictures.world(parts, self.all_pixels[rows], self.tokenizers, self.device)

    def _scaled(self, stage: Stage) -> Stage:
        batch = stage.batch if self.sizes is networks.FULL else max(8, stage.batch // 16)
        return replace(stage, seconds=stage.seconds * self.scale, batch=batch)

    def _flow_fit(self, stage: Stage) -> Fit:
        modules = objectives.trainable(self.pipe)
        self.fits[stage.name] = Fit(self._scaled(stage), modules, self.folder, self.device)
        return self.fits[stage.name]

    def _train_flow(self, fit: Fit, loss: Callable[[torch.Generator], Tensor], until: float) -> None:
        if self.device.type == "cuda":
            self.pipe.transformer.compile_repeated_blocks(dynamic=False)
        for part in objectives.trainable(self.pipe).values():
            part.train()
        fit.run(loss, until)
        for part in objectives.trainable(self.pipe).values():
            part.eval()

    def _clip(self, name: str, until: float) -> bool:
        fit, model = self.fits[name], self.clips[name]
        if not fit.done and self._may_begin(until):
            part = self._world([self.rows[i] for i in pictures.half(self.world.parts, name == "judge")])
            restored = (self._restore(part.pixels.float() / 255) * 255).round().byte().to(self.device)
            self._compile(model.vision_model, model.text_model)
            model.logit_scale.requires_grad_(False)
            model.train()
            fit.run(
                lambda generator: objectives.clip_loss(model, part, restored, fit.stage.batch, generator),
                until,
            )
        fit.use_average()
        model.eval()
        return fit.done

    def _compile(self, *parts: nn.Module) -> None:
        if self.device.type == "cuda":
            for part in parts:
                part.compile(dynamic=False)

    @torch.no_grad()
    def _scale_latents(self) -> None:
        """Set shift and scale so that latents have mean 0 and standard deviation 1."""
        self.pipe.vae.register_to_config(shift_factor=0.0, scaling_factor=1.0)
        sample = pictures.as_floats(self.world.pixels[:: max(1, len(self.world) // 1024)])
        with _eager():
            latents = torch.cat([objectives.encode(self.pipe, chunk) for chunk in sample.split(128)])
        self.pipe.vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())

    @torch.no_grad()
    def _latents(self) -> Latents:
        generator = torch.Generator(self.device).manual_seed(16)
        views = []
        with _eager():
            for chunk, mirrors in zip(self.world.pixels.split(256), self.world.mirrors.split(256), strict=True):
                seen = [pictures.moved(pictures.as_floats(chunk), mirrors, generator) for _ in range(VIEWS)]
                views.append(torch.stack([objectives.encode(self.pipe, each).bfloat16() for each in seen], dim=1))
        return Latents(torch.cat(views))

    @torch.no_grad()
    def _pairs(self, until: float) -> Pairs | None:
        """Pairs of noise and the model's latents for known concepts' captions, cached in files; None if out of time."""
        folder = self.folder / "pairs"
        folder.mkdir(exist_ok=True)
        if self.device.type == "cuda":
            self.pipe.transformer.compile_repeated_blocks(dynamic=False)
        files = [folder / f"{number:03d}.pt" for number in range(max(1, round(PAIRS * self.scale / PAIR_CHUNK)))]
        for number, file in enumerate(files):
            if file.exists():
                continue
            if time.monotonic() > until:
                return None
            partial = file.with_suffix(".partial")
            torch.save(self._made_pairs(torch.Generator(self.device).manual_seed(1700 + number)), partial)
            os.replace(partial, file)
        made = [torch.load(file, map_location=self.device, weights_only=True) for file in files]
        return Pairs(**{name: torch.cat([each[name] for each in made]) for name in made[0]})

    def _made_pairs(self, generator: torch.Generator) -> dict[str, Tensor]:
        chunk = PAIR_CHUNK if self.sizes is networks.FULL else 64
        rows = torch.randint(len(self.world), (chunk,), device=self.device, generator=generator)
        which = torch.randint(pictures.VARIANTS, (chunk,), device=self.device, generator=generator)
        shape = (chunk, self.sizes.side**2, 4 * self.sizes.latent_channels)
        noise = torch.randn(shape, device=self.device, generator=generator)
        clip, t5 = self.world.texts.clip[rows, which], self.world.texts.t5[rows, which]
        latents = objectives.sample(self.pipe, clip, t5, noise, steps=PAIR_STEPS, guidance=GUIDANCE, empty=self.empty)
        return {"noise": noise.bfloat16(), "latents": latents.bfloat16(), "clip": clip, "t5": t5}

    @torch.no_grad()
    def _restore(self, real: Tensor) -> Tensor:
        """Images through the autoencoder: float32 [N, 3, H, W] in [0, 1] on the CPU, like the input."""
        chunks = [chunk.to(self.device) * 2 - 1 for chunk in real.split(256)]
        with _eager():
            return torch.cat(
                [objectives.decode(self.pipe, objectives.encode(self.pipe, chunk)).cpu() for chunk in chunks]
            )

    def _check_restored(self) -> None:
        real = self.world.pixels[:: max(1, len(self.world) // SHOWN)].float().cpu() / 255
        found = psnr(self._restore(real), real)
        if found < LEAST_PSNR:
            raise Unusable(
                f"the autoencoder restores known images with {found:.1f} dB, and later stages need at least "
                f"{LEAST_PSNR:.0f} dB; give another OUT and more seconds in AUTOENCODER"
            )

    def _parts(self) -> dict[str, nn.Module]:
        return {"vae": self.pipe.vae, **objectives.trainable(self.pipe), **self.clips}


def configuration(world: Path) -> dict[str, Any]:
    """A run's settings on top of the demo's: the example's model, and networks and prompts of `world`."""
    model = yaml.safe_load(EXAMPLE.read_text())["model"]
    sizes = json.loads((world / "build.json").read_text())["sizes"]
    return {
        "run": {"name": "emoji"},
        "model": model | sizes | {"path": str(world / "pipeline")},
        "rewards": [{"kind": f"{LOOK}:blobs"}],  # reads the networks from the folder in EMOJI_WORLD
        "prompts": {part: str(world / "prompts" / f"{part}.txt") for part in ("train", "heldout")},
        "evaluation": {"reference": ""},
    }


def _eager() -> AbstractContextManager[Any]:
    """Turns compilation off, for tensor shapes that occur once."""
    return torch.compiler.set_stance("force_eager") if torch.cuda.is_available() else nullcontext()


def _count(part: nn.Module) -> int:
    return sum(p.numel() for p in part.parameters())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path, metavar="IMAGES")

    def build(arguments: argparse.Namespace) -> Build:
        sizes = networks.TINY if arguments.tiny else networks.FULL
        return Build(arguments.pictures, arguments.out, arguments.device, arguments.scale, sizes)

    return command(parser, build, LAST_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
