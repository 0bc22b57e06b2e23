"""The small world's edits: a picture of one object, which shall have another colour, and nothing else may change.

    python -m solrl_ray.testbed.editing edits
    solrl train demo edits/edit.yaml

The first command writes prompts with reference pictures, the testbed's pipeline as one that edits, and what a run of
the demo needs to train it. Prompts are captions of the wanted pictures, because the pipeline's text encoders know no
other words. The pipeline has never seen a reference: it copies it, colour and all.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from solrl_ray.config import yaml_text
from solrl_ray.models.paths import resolve
from solrl_ray.records import Address
from solrl_ray.sampling.noise import uniform
from solrl_ray.testbed.world import BACKGROUNDS, COLOURS, SHAPES, SIZES, Scene, parse, picture

PIPELINE = "builtin:testbed/pipeline"
PARTS = {"train": 192, "heldout": 128}
"""File of prompts → their number."""


def recoloured(images: Tensor, prompts: Sequence[str], reference: Tensor) -> Tensor:
    """How close pictures are to their reference in the prompt's colour: 1 - (RMSE where the object is + RMSE
    elsewhere) / 2, in [0, 1]. An object in the mean of all colours scores more than one that keeps a wrong one.

    Args:
        images: float [B, 3, H, W] in [0, 1].
        prompts: B captions of one object, whose size, shape and background are the reference's.
        reference: float [B, 3, H, W] in [0, 1].

    Returns:
        float32 [B], on the CPU.
    """
    found = [_wanted(seen, parse(text)) for seen, text in zip(reference.float().cpu(), prompts, strict=True)]
    wanted, cover = (torch.stack(each) for each in zip(*found, strict=True))
    errors = (images.float().cpu() - wanted).square().mean(dim=1)
    inside, outside = (
        ((errors * share).sum(dim=(1, 2)) / share.sum(dim=(1, 2))).sqrt() for share in (cover, 1 - cover)
    )
    return 1 - (inside + outside) / 2


def edited(prompt: str, address: Address, reference: Tensor) -> Tensor:
    """The picture that a prompt asks for: `evaluation.reference`."""
    return _wanted(reference, parse(prompt))[0]


def _wanted(reference: Tensor, scene: Scene) -> tuple[Tensor, Tensor]:
    """The reference [3, H, W] with its object in the scene's colour, and how much of each pixel is the object's."""
    background = torch.tensor(list(BACKGROUNDS.values()))[scene.fields[8]][:, None, None]
    palette = torch.tensor(list(COLOURS.values()))
    apart = reference - background
    strongest = reference.flatten(1)[:, apart.square().sum(dim=0).argmax()]
    colour = palette[(palette - strongest).square().sum(dim=1).argmin()][:, None, None]
    towards = colour - background
    cover = ((apart * towards).sum(dim=0) / towards.square().sum()).clamp(0, 1)
    return torch.lerp(background.expand_as(reference), palette[scene.fields[2]][:, None, None], cover), cover


def write_prompts(folder: Path, parts: dict[str, int] | None = None) -> None:
    """Write ``train.jsonl`` and ``heldout.jsonl``, and their pictures beside them.

    Each scene is in one part: scenes of one object, and the colours before and after, are numbered, and every fifth is
    held out.
    """
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
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
    pools = {"train": [i for i in order if i % 5], "heldout": [i for i in order if i % 5 == 0]}
    for part, count in (parts or PARTS).items():
        lines = []
        for index in map(int, pools[part][:count]):
            before, after = edits[index]
            address = Address(run_seed=0, purpose="references", index=index)
            pixels = (picture(before.caption, address) * 255).round().byte()
            name = f"{part}-{index}.png"
            Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / name)
            lines.append(json.dumps({"text": after.caption, "reference": name}) + "\n")
        (folder / f"{part}.jsonl").write_text("".join(lines))


def write_pipeline(folder: Path) -> Path:
    """Write the testbed's pipeline as a checkpoint of FLUX.1 Kontext."""
    shutil.copytree(resolve(PIPELINE), folder, dirs_exist_ok=True)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxKontextPipeline"}, indent=1))
    return folder


def write_all(folder: Path, parts: dict[str, int] | None = None) -> Path:
    """Write prompts, pipeline and configuration; returns the configuration, which comes after that of the demo."""
    write_prompts(folder, parts)
    here = folder.absolute()
    config = {
        "run": {"name": "edits", "iterations": 40},
        "model": {"family": "flux_kontext", "path": str(write_pipeline(here / "pipeline")), "references": 1},
        "prompts": {part: str(here / f"{part}.jsonl") for part in PARTS},
        "rewards": [{"kind": "solrl_ray.testbed.editing:recoloured"}],
        # Many small steps: an optimiser step has one prompt, of whose 24 seeds it trains on the 2 best and the 2 worst.
        "rollout": {"prompts": 3, "keep": 4, "regenerate": {"micro_batch": 4}},
        "learner": {"updates": 3, "micro_batch": 4},
        "fleet": {"learners": {"threads": 1}},
        # Seeds of a prompt differ by little, prompts by much.
        "objective": {"advantage": {"std": "group"}},
        "evaluation": {"reference": "solrl_ray.testbed.editing:edited", "every": 40, "prompts": 128, "samples": 2},
    }
    file = folder / "edit.yaml"
    file.write_text(yaml_text.dump(config))
    return file


def without_edits(folder: Path) -> tuple[float, float]:
    """Mean reward of the held-out prompts for copies of the references, and for objects in the mean of all colours."""
    from PIL import Image

    lines = [json.loads(line) for line in (folder / "heldout.jsonl").read_text().splitlines()]
    prompts = [line["text"] for line in lines]
    pixels = [torch.from_numpy(np.array(Image.open(folder / line["reference"]))) for line in lines]
    copies = torch.stack(pixels).permute(0, 3, 1, 2) / 255
    colour = torch.tensor(list(COLOURS.values())).mean(dim=0)[:, None, None]
    faded = []
    for seen, scene in zip(copies, map(parse, prompts), strict=True):
        ground = torch.tensor(list(BACKGROUNDS.values()))[scene.fields[8]][:, None, None]
        faded.append(torch.lerp(ground.expand_as(seen), colour, _wanted(seen, scene)[1]))
    copied, mean = (recoloured(each, prompts, copies).mean().item() for each in (copies, torch.stack(faded)))
    return copied, mean


if __name__ == "__main__":
    (out,) = map(Path, sys.argv[1:])
    print(f"wrote {write_all(out)}; train it with: solrl train demo {out}/edit.yaml")
    print("held-out reward of copies {:.3f}, of objects in the mean of all colours {:.3f}".format(*without_edits(out)))
