"""Scores images and prompts with the original packages `hpsv2` and `image-reward`, with random weights.

Runs in the environment of `make parity`, which does not contain this project's code:

    python originals.py FOLDER [--full]

Reads FOLDER/pictures/*.png and FOLDER/prompts.json; writes checkpoints in the published format, and pixels and
scores to FOLDER/originals.pt. Three things are replaced so that the packages can be imported: the module `turtle`
(hpsv2 imports an unused name from it, which needs Tk), fairscale's wrapper (unused without gradients) and the BERT
vocabulary that ImageReward would download.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL import Image
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--full", action="store_true", help="the published sizes: minutes, 8 GB of memory")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    pictures: list[Image.Image] = [Image.open(file) for file in sorted((folder / "pictures").glob("*.png"))]
    prompts = json.loads((folder / "prompts.json").read_text())
    torch.manual_seed(0)
    with torch.no_grad():
        made = {
            "hpsv2": hpsv2(folder, pictures, prompts, arguments.full),
            "imagereward": imagereward(folder, pictures, prompts, arguments.full),
        }
    torch.save(made, folder / "originals.pt")


def hpsv2(folder: Path, pictures: list[Image.Image], prompts: list[str], full: bool) -> dict[str, Any]:
    stub("turtle", forward=None)
    from hpsv2.src.open_clip import create_model_and_transforms, get_tokenizer

    architecture = "ViT-H-14" if full else "ViT-B-32"
    # The arguments of hpsv2.img_score.initialize_model, without downloading a checkpoint that is then overwritten.
    model, _, preprocess = create_model_and_transforms(
        architecture,
        None,
        precision="amp",
        device="cpu",
        light_augmentation=True,
        output_dict=True,
        with_score_predictor=False,
        with_region_predictor=False,
    )
    shake(model)
    model.eval()
    torch.save({"epoch": 0, "state_dict": model.state_dict()}, folder / "HPS_v2.1_compressed.pt")
    tokenizer = get_tokenizer(architecture)
    pixels = [preprocess(picture) for picture in pictures]
    scores = []
    for image, prompt in zip(pixels, prompts, strict=True):
        outputs = model(image[None], tokenizer([prompt]))
        scores.append((outputs["image_features"] @ outputs["text_features"].T).item())
    return {"pixels": torch.stack(pixels), "scores": scores, "architecture": architecture}


def imagereward(folder: Path, pictures: list[Image.Image], prompts: list[str], full: bool) -> dict[str, Any]:
    stub("fairscale.nn.checkpoint.checkpoint_activations", checkpoint_wrapper=None)
    # Without its __init__, which imports training code and OpenAI's CLIP.
    for name in ("ImageReward", "ImageReward.models"):
        shell(name)
    import transformers

    vocabulary = str(folder / "bert" / "vocab.txt")
    transformers.BertTokenizer.from_pretrained = classmethod(lambda cls, _: cls(vocabulary))
    module: Any = importlib.import_module("ImageReward.ImageReward")
    settings = {
        "architectures": ["BertModel"],
        "hidden_size": 768,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
        "num_attention_heads": 12,
        "num_hidden_layers": 12 if full else 3,
        "vocab_size": 30524,
        "encoder_width": 768,
        "add_cross_attention": True,
    }
    (folder / "med_config.json").write_text(json.dumps(settings))
    if not full:
        pretrained = module.BLIP_Pretrain
        module.BLIP_Pretrain = lambda image_size, vit, med_config: pretrained(
            image_size=image_size, vit="base", med_config=med_config
        )
    model = module.ImageReward(str(folder / "med_config.json"), device="cpu")
    shake(model)
    model.eval()
    torch.save(model.state_dict(), folder / "ImageReward.pt")
    files = [str(file) for file in sorted((folder / "pictures").glob("*.png"))]
    scores = [model.score(prompt, file) for prompt, file in zip(prompts, files, strict=True)]
    return {"pixels": torch.stack([model.preprocess(picture) for picture in pictures]), "scores": scores}


def shake(model: nn.Module) -> None:
    """Add noise to every weight: initial values have many zeros and ones, which would hide swapped weights."""
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.02)


def stub(name: str, **content: object) -> None:
    parts = name.split(".")
    for i in range(len(parts)):
        sys.modules.setdefault(".".join(parts[: i + 1]), ModuleType(".".join(parts[: i + 1])))
    for key, value in content.items():
        setattr(sys.modules[name], key, value)


def shell(name: str) -> None:
    """Register a package without running its `__init__`."""
    spec = importlib.util.find_spec("ImageReward") if name == "ImageReward" else None
    module = ModuleType(name)
    if spec is not None:
        assert spec.submodule_search_locations
        module.__path__ = list(spec.submodule_search_locations)
    else:
        module.__path__ = [f"{sys.modules['ImageReward'].__path__[0]}/models"]
    sys.modules[name] = module


if __name__ == "__main__":
    main()
