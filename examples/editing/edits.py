"""Image editing on the testbed: recolour the one object of an image and change nothing else.

    python examples/editing/edits.py edits
    solrl train demo edits/edit.yaml

The first command writes prompts with reference images, an editing version of the testbed's pipeline, and a
configuration that trains it on top of the demo's. Prompts are captions of the edited images, because the pipeline's
text encoders know no other words. The original pipeline has never seen a reference and copies it. So the first command
also trains it to edit, for about a minute, with captions of which half name a random colour: the result edits the right
object, but often in a wrong colour.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from solrl_ray import models
from solrl_ray.config import yaml_text
from solrl_ray.config.loading import load
from solrl_ray.config.named import resolve as resolve_names
from solrl_ray.config.schema import Model
from solrl_ray.models.paths import resolve
from solrl_ray.models.references import SeesReferences
from solrl_ray.records import REFERENCE_TOKENS, Address
from solrl_ray.sampling.noise import uniform
from solrl_ray.testbed.world import BACKGROUNDS, COLOURS, SHAPES, SIZES, Scene, parse, picture

SOURCE = Path(__file__).absolute()
"""This file: the run's configuration names its functions."""
PIPELINE = "builtin:testbed/pipeline"
PARTS = {"train": 192, "heldout": 128}
"""Name of a prompt file → its number of prompts."""
STEPS = 80
"""Optimiser steps that teach the pipeline to edit."""


def recoloured(images: Tensor, prompts: Sequence[str], reference: Tensor) -> Tensor:
    """Score of an edit in [0, 1]: how well the object has the prompt's colour, times how well the rest is preserved.

    Colour is the mean over the object's pixels of b² / (a² + b²). Here a is the squared distance to the reference with
    the object in the prompt's colour; b is the smallest squared distance to the reference with the object in any other
    colour, backgrounds' included. A pixel so scores above 1/2 only if no other colour is nearer, and an object that
    keeps its colour or fades scores 0.

    Preservation is 1 - sqrt(sum of the squared errors outside the object / the object's area), at least 0: an object
    drawn twice as large costs as much as one in a wrong colour.

    Args:
        images: float [B, 3, H, W] in [0, 1].
        prompts: B captions of one object, whose size, shape and background are the reference's.
        reference: float [B, 3, H, W] in [0, 1].

    Returns:
        float32 [B], on the CPU.
    """
    scores = []
    for image, seen, text in zip(images.float().cpu(), reference.float().cpu(), prompts, strict=True):
        scene = parse(text)
        drawn, cover = _in_all_colours(seen, scene)
        errors = (image - drawn).square().sum(dim=1)
        wanted = scene.fields[2]
        other = torch.cat([errors[:wanted], errors[wanted + 1 :]]).amin(dim=0)
        share = other.square() / (errors[wanted].square() + other.square()).clamp(min=1e-12)
        beside = ((errors[wanted] / 3 * (1 - cover)).sum() / cover.sum()).sqrt()
        scores.append(share[cover > 0.5].mean() * (1 - beside).clamp(min=0))
    return torch.stack(scores)


def edited(prompt: str, address: Address, reference: Tensor) -> Tensor:
    """The correct edit for a prompt; used as `evaluation.reference`."""
    scene = parse(prompt)
    return _in_all_colours(reference, scene)[0][scene.fields[2]]


def _in_all_colours(reference: Tensor, scene: Scene) -> tuple[Tensor, Tensor]:
    """The reference [3, H, W] with its object in each object colour, then in each background colour: [11, 3, H, W]; and
    the share of each pixel that the object covers, [H, W]."""
    backgrounds, palette = (torch.tensor(list(colours.values())) for colours in (BACKGROUNDS, COLOURS))
    background = backgrounds[scene.fields[8]][:, None, None]
    difference = reference - background
    strongest = reference.flatten(1)[:, difference.square().sum(dim=0).argmax()]
    towards = palette[(palette - strongest).square().sum(dim=1).argmin()][:, None, None] - background
    cover = ((difference * towards).sum(dim=0) / towards.square().sum()).clamp(0, 1)
    colours = torch.cat([palette, backgrounds])[:, :, None, None]
    return torch.lerp(background, colours, cover), cover


def _edits() -> dict[str, list[tuple[Scene, Scene]]]:
    """Pairs of scenes with one object, before and after a change of its colour, by prompt file.

    Every fifth pair is held out. The order is pseudo-random and fixed.
    """
    edits = [
        (Scene((1, size, before, shape, 0, 0, 0, 0, ground)), Scene((1, size, after, shape, 0, 0, 0, 0, ground)))
        for size in range(len(SIZES))
        for shape in range(len(SHAPES))
        for ground in range(len(BACKGROUNDS))
        for before in range(len(COLOURS))
        for after in range(len(COLOURS))
        if before != after
    ]
    order = uniform(Address(run_seed=0, purpose="edits"), (len(edits),)).argsort()
    return {
        "train": [edits[i] for i in order if i % 5],
        "heldout": [edits[i] for i in order if i % 5 == 0],
    }


def write_prompts(folder: Path, parts: dict[str, int] | None = None) -> None:
    """Write ``train.jsonl`` and ``heldout.jsonl``, which share no edit, and their reference images to `folder`."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    pools = _edits()
    for part, count in (parts or PARTS).items():
        lines = []
        for number, (before, after) in enumerate(pools[part][:count]):
            name = f"{part}-{number}.png"
            pixels = _drawn(before, Address(run_seed=0, purpose=part, index=number))
            Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / name)
            lines.append(json.dumps({"text": after.caption, "reference": name}) + "\n")
        (folder / f"{part}.jsonl").write_text("".join(lines))


def _drawn(scene: Scene, address: Address) -> Tensor:
    """The scene's image, uint8 [3, 32, 32]."""
    return (picture(scene.caption, address) * 255).round().byte()


def write_pipeline(folder: Path) -> Path:
    """Write the testbed's pipeline to `folder` as a checkpoint of FLUX.1 Kontext; returns `folder`."""
    shutil.copytree(resolve(PIPELINE), folder, dirs_exist_ok=True)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxKontextPipeline"}, indent=1))
    return folder


def teach(folder: Path, config: Model, steps: int) -> None:
    """Train the pipeline in `folder` to edit, by flow matching on training edits; half of the captions name a random
    colour."""
    generator = torch.Generator().manual_seed(0)
    model = models.load(config, "cpu")
    assert isinstance(model, SeesReferences)
    captions, befores, afters = [], [], []
    for number, (before, after) in enumerate(_edits()["train"][: 16 * steps]):
        address = Address(run_seed=0, purpose="taught", index=number)
        befores.append(_drawn(before, address)[None])
        afters.append(_drawn(after, address)[None])
        colour = number // 2 % len(COLOURS) if number % 2 else after.fields[2]
        captions.append(Scene((*after.fields[:2], colour, *after.fields[3:])).caption)
    seen = model.encode_seeing(captions, befores, 32)
    clean = torch.stack([each[REFERENCE_TOKENS] for each in model.encode_seeing(captions, afters, 32)])
    transformer: Any = model.transformer.requires_grad_(True)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-3, weight_decay=0)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        rows = torch.randint(len(clean), (32,), generator=generator)
        noise = torch.randn(len(rows), *clean.shape[1:], generator=generator)
        sigma = torch.sigmoid(0.5 + torch.randn(len(rows), generator=generator))
        embedding = {name: torch.stack([seen[row][name] for row in rows]) for name in seen[0]}
        velocity = model.velocity(torch.lerp(clean[rows], noise, sigma[:, None, None]), sigma, embedding)
        optimizer.zero_grad()
        (velocity - (noise - clean[rows])).square().mean().backward()
        nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        decay.step()
    nn.Module.to(transformer, torch.bfloat16).save_pretrained(folder / "transformer")


def write_all(folder: Path, parts: dict[str, int] | None = None, steps: int = STEPS) -> Path:
    """Write prompts, pipeline and configuration; returns the configuration file, to be named after the demo's.

    `steps`: optimiser steps that teach the pipeline to edit.
    """
    write_prompts(folder, parts)
    here = folder.absolute()
    pipeline = write_pipeline(here / "pipeline")
    config = {
        "run": {"name": "edits", "iterations": 40},
        "model": {"family": "flux_kontext", "path": str(pipeline), "references": 1},
        "prompts": {part: str(here / f"{part}.jsonl") for part in PARTS},
        "rewards": [{"kind": f"{SOURCE}:recoloured"}],
        # Many small optimiser steps, each on one prompt: the 2 best and the 2 worst of its 24 seeds.
        "rollout": {"prompts": 3, "keep": 4, "regenerate": {"micro_batch": 4}},
        "learner": {"updates": 3, "micro_batch": 4},
        "fleet": {"learners": {"threads": 1}},
        "evaluation": {"reference": f"{SOURCE}:edited", "every": 40, "prompts": 128, "samples": 2},
    }
    file = folder / "edit.yaml"
    file.write_text(yaml_text.dump(config))
    if steps:
        teach(pipeline, load([*resolve_names([Path("demo")]), file]).model, steps)
    return file


def without_edits(folder: Path) -> dict[str, float]:
    """Mean held-out reward of constructed answers: copied references, objects in the mean colour, correct edits."""
    from PIL import Image

    lines = [json.loads(line) for line in (folder / "heldout.jsonl").read_text().splitlines()]
    prompts = [line["text"] for line in lines]
    pixels = [torch.from_numpy(np.array(Image.open(folder / line["reference"]))) for line in lines]
    copies = torch.stack(pixels).permute(0, 3, 1, 2) / 255
    mean = torch.tensor(list(COLOURS.values())).mean(dim=0)[:, None, None]
    drawn: dict[str, list[Tensor]] = {"copies": list(copies), "objects in the mean of all colours": [], "edits": []}
    for seen, scene in zip(copies, map(parse, prompts), strict=True):
        colours, cover = _in_all_colours(seen, scene)
        ground = colours[len(COLOURS) + scene.fields[8]]
        drawn["objects in the mean of all colours"].append(torch.lerp(ground, mean, cover))
        drawn["edits"].append(colours[scene.fields[2]])
    return {name: recoloured(torch.stack(each), prompts, copies).mean().item() for name, each in drawn.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only-prompts", action="store_true")
    arguments = parser.parse_args()
    out = arguments.folder
    if arguments.only_prompts:
        write_prompts(out)
        return
    print(f"wrote {write_all(out)}; train it with: solrl train demo {out}/edit.yaml")
    print("held-out reward of", ", of ".join(f"{name} {reward:.3f}" for name, reward in without_edits(out).items()))


if __name__ == "__main__":
    main()
