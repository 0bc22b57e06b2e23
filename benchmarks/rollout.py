"""How much faster is Sol-RL's rollout of one prompt than sampling its whole pool in bfloat16?

    python benchmarks/rollout.py flux --work FOLDER [--tier fp8] [--repeats 2] [--out FOLDER]

Measures all variants in one process, in turn, with one loaded model, compiled block by block, and the same
micro-batches, decoder and reward (CLIPScore, ViT-L/14):

    naive      96 seeds × 10 steps in bfloat16, decoded and scored
    two-stage  96 seeds × 6 steps in the tier, decoded and scored; the 12 best and 12 worst × 10 steps in bfloat16,
               decoded and scored again
    pruned     the same, but previews are also scored after AFTER steps, and all except KEEP per pool are stopped:
               `--prune AFTER:KEEP:MICRO_BATCH`, which takes several values (docs/decisions/pruned-previews.md)

Architectures are the published ones with random weights, which `full_size.py` writes to --work once. Resolutions, steps
and solvers are those of configs/models. `--all-blocks` quantises by configs/scopes/all_blocks.yaml instead of the
published scope. `--set model.preview_decoder=FOLDER` decodes previews with another decoder.

For videos, CLIPScore sees four frames and `--set rollout.preview.latent_frames=[0,4,8,12]` selects the frames that
previews decode. A smaller pool with the same proportions costs as much per seed:

    python benchmarks/rollout.py wan --repeats 1 --prune 2:6:1 --set rollout.pool=16 --set rollout.keep=4
        --set rollout.explore.micro_batch=1 --set rollout.regenerate.micro_batch=1

`--set model.cfg.scale=4.5` samples with classifier-free guidance; compare the seconds with those of a run without.

Prints the result; writes rollout_MODEL.json into FOLDER (default benchmarks/results).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import CONFIGS, MODELS, SOL_RL, checkpoints, embeddings, make, options, parsed, reported_errors, write
from torch import Tensor

from solrl_ray import models, rewards
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.models.compilation import compile_, compile_decoder
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.quantization.attestation import device_name
from solrl_ray.quantization.scope import quantize_
from solrl_ray.records import Pruning, WorkUnit
from solrl_ray.rollout.sampler import Sampler, references_for
from solrl_ray.rollout.selection import PromptSelection


def settings(arguments: argparse.Namespace) -> Config:
    overrides = [
        *checkpoints(arguments.model, arguments.work),
        "rollout.explore.micro_batch=24",
        "rollout.preview.prune=null",  # only the variant `pruned` prunes
        f"rollout.explore.precision={arguments.tier}",
        *arguments.set,
    ]
    files = [SOL_RL, CONFIGS / "models" / MODELS[arguments.model]]
    return load(files + [CONFIGS / "scopes/all_blocks.yaml"] * arguments.all_blocks, overrides)


class World:
    """A model in full precision, its copy for previews, one prompt, and samplers for both."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.full = models.load(config.model, device, components={"transformer", "vae"})
        self.preview = models.load(config.model, device, components={"preview_decoder"})
        self.preview.use_transformer(copy.deepcopy(self.full.transformer))
        report = quantize_(self.preview.transformer, config.rollout.explore.precision, config.model.quantization)
        self.quantised = report.sentence()
        compile_(self.full.transformer, config.compile, device, "bf16")
        compile_(self.preview.transformer, config.compile, device, config.rollout.explore.precision)
        self.decoders = compile_decoder(self.full.decoder, config.compile, device)
        compile_decoder(self.preview.decoder, config.compile, device)
        self.reward = rewards.load(config.rewards, device)
        self.prompt = read_prompts(config.prompts.train, "prompts.train", seen=config.model.references)[0]
        (self.embedding,) = embeddings(config.model, [self.prompt])
        rollout = config.rollout
        self.sample = Sampler(
            config, self.full, self.reward, steps=rollout.regenerate.steps, micro_batch=rollout.regenerate.micro_batch
        )
        self.regenerate(list(range(rollout.regenerate.micro_batch)))
        self.explore = self._explorer(rollout.explore.micro_batch)
        # The previews' decoder is timed separately with this micro-batch: compile it for that size now.
        self.decode_and_score(self.explore._decode_preview, rollout.regenerate.micro_batch)

    def _explorer(self, micro_batch: int) -> Sampler:
        """A sampler for previews that has sampled a micro-batch as warm-up."""
        steps = self.config.rollout.explore.steps
        explorer = Sampler(self.config, self.preview, self.reward, steps=steps, micro_batch=micro_batch)
        explorer.preview(self._unit("explore", range(micro_batch)), self.prompt, self.embedding)
        return explorer

    def naive(self) -> None:
        size = self.config.rollout.regenerate.micro_batch
        for start in range(0, self.config.rollout.pool, size):
            self.sample(self._unit("sample", range(start, start + size)), self.prompt, self.embedding)

    def previews(self) -> list[int]:
        """Sample all previews; returns the indices of the chosen seeds."""
        rollout = self.config.rollout
        selection = PromptSelection(rollout.pool, rollout.keep, prompt_id=self.prompt.id)
        for start in range(0, rollout.pool, rollout.explore.micro_batch):
            unit = self._unit("explore", range(start, start + rollout.explore.micro_batch))
            selection.add(unit.indices, self.explore.preview(unit, self.prompt, self.embedding))
        top, bottom = selection.select()
        return [candidate.index for candidate in top + bottom]

    def pruned(self, after: int, keep: int, micro_batch: int) -> Callable[[], Any]:
        """A function that samples previews and stops those in the middle of the ranking after `after` steps."""
        explore, pool = self._explorer(micro_batch), range(self.config.rollout.pool)
        unit = dataclasses.replace(self._unit("explore", pool), prune=Pruning(after=after, keep=keep))
        return lambda: explore.preview(unit, self.prompt, self.embedding)

    def regenerate(self, chosen: list[int]) -> None:
        self.sample(self._unit("regenerate", chosen), self.prompt, self.embedding)

    def decode_and_score(self, decode: Callable[[Tensor], Tensor], count: int) -> None:
        """Decode and score `count` random latents."""
        size = self.config.rollout.regenerate.micro_batch
        latents = torch.randn(size, *self.full.latent_shape, device=self.device)
        for _ in range(count // size):
            images = decode(latents)
            self.reward.score(images, [self.prompt.text] * size, references_for(images, self.embedding)).cpu()

    def _unit(self, stage: Any, indices: Any) -> WorkUnit:
        return WorkUnit(stage=stage, iteration=0, revision=0, prompt_id=self.prompt.id, indices=tuple(indices))


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def measured(world: World, repeats: int, prunings: list[tuple[int, int, int]]) -> dict[str, list[float]]:
    """Variant → seconds of each repetition; variants take turns, with warm samplers."""
    rollout = world.config.rollout
    chosen: list[int] = list(range(rollout.keep))
    sides: dict[str, Callable[[], Any]] = {
        "naive": world.naive,
        "previews": world.previews,
        "regeneration": lambda: world.regenerate(chosen),
        "decode, score: naive": lambda: world.decode_and_score(world.full.decode, rollout.pool),
        "decode, score: previews": lambda: world.decode_and_score(world.explore._decode_preview, rollout.pool),
        "decode, score: regeneration": lambda: world.decode_and_score(world.full.decode, rollout.keep),
    }
    sides |= {words(pruning): world.pruned(*pruning) for pruning in prunings}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            found[name].append(seconds(run, world.device))
    return found


def words(pruning: tuple[int, int, int]) -> str:
    return "previews, pruned after {} to {}, micro-batch {}".format(*pruning)


def pruning(text: str) -> tuple[int, int, int]:
    after, keep, micro_batch = map(int, text.split(":"))
    return after, keep, micro_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--tier", default="fp8")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prune", nargs="+", type=pruning, default=[], metavar="AFTER:KEEP:MICRO_BATCH")
    parser.add_argument("--all-blocks", action="store_true", help="quantise by configs/scopes/all_blocks.yaml")
    options(parser)
    arguments = parsed(parser)
    make(arguments.model, arguments.work, arguments.layers)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    world = World(settings(arguments), device)
    found = measured(world, arguments.repeats, arguments.prune)
    took = {name: statistics.median(values) for name, values in found.items()}
    drawn = world.config.rollout
    two_stage = took["previews"] + took["regeneration"]
    result = {
        "question": "one prompt's rollout: two stages compared with the whole pool in bfloat16",
        "model": arguments.model,
        "tier": arguments.tier,
        "quantised": world.quantised,
        "gpu": device_name(device),
        "torch": torch.__version__,
        "layers": arguments.layers or "published",
        "decoder_compiled": world.decoders,
        "preview_decoder": world.config.model.preview_decoder or "the VAE",
        "settings": arguments.set,
        "sampling": {
            "pool": drawn.pool,
            "keep": drawn.keep,
            "steps": drawn.regenerate.steps,
            "preview_steps": drawn.explore.steps,
            "latent_frames": drawn.preview.latent_frames,
        },
        "seconds": took,
        "repetitions": found,
        "two_stage": two_stage,
        "ratio": took["naive"] / two_stage,
        "pruned": {
            ":".join(map(str, one)): {"seconds": pruned, "ratio": took["naive"] / pruned}
            for one in arguments.prune
            for pruned in [took[words(one)] + took["regeneration"]]
        },
    }
    write(arguments.out / f"rollout_{arguments.model}{'_all_blocks' * arguments.all_blocks}.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    with reported_errors():
        main()
