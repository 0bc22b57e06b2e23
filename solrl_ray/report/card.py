"""``solrl push``: the model card of a finished run, and the files to publish: LoRA, model card and images.

The card reveals nothing about the machine: local paths are reduced to their last part.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

import solrl_ray
from solrl_ray.common.files import read_regular
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import UserError
from solrl_ray.models import paths
from solrl_ray.models.stock_call import StockCall
from solrl_ray.report.data import RunData
from solrl_ray.report.grids import REFERENCE
from solrl_ray.report.pictures import Gallery, reduced
from solrl_ray.report.rendering import markdown, rendered
from solrl_ray.report.summary import Summary, unchanged
from solrl_ray.report.trackers import redacted
from solrl_ray.storage.run_folder import SUMMARY_FILE

CARD = "README.md"
LORA_FILE = "pytorch_lora_weights.safetensors"
"""`FILE` of `solrl_ray.policy.saving`, whose import takes seconds."""
LONGEST = 512
"""Maximum side of a published image, in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to publish on the Hugging Face hub."""

    repository: str
    """Repository, ``owner/name``."""
    revision: str | None
    """Branch; None: the default branch."""


def hub_id(model: str) -> str | None:
    """Hugging Face id of a checkpoint; None for a local folder or a model shipped with the package."""
    resolved = paths.resolve(model)
    return resolved if isinstance(resolved, str) else None


def contents(data: RunData, target: Target, *, lora: str = "lora") -> dict[str, bytes]:
    """File name → content of the files to publish.

    `lora`: folder with the weights, ``lora`` or (with `RunData.at_best`) ``lora_best``.

    Raises UserError if the run has not ended or was not evaluated, or if its LoRA file has changed since the summary
    was written.
    """
    shown, gain = data.shown, data.gain
    if data.summary is None or gain is None:
        done, planned = len(data.iterations), data.config.run.iterations
        raise UserError(
            f"{data.folder} has not ended: it has finished {done} of {planned} iterations. "
            f"Continue it with solrl train --resume {data.folder}."
        )
    gallery, images = _pictures(data)
    config, named = data.config, hub_id(data.config.model.path)
    task = f"{'image' if config.model.references else 'text'}-to-{'video' if config.model.frames else 'image'}"
    model = _name(config.model.path)
    base_name = "the pipeline of the testbed" if config.model.path.startswith(paths.BUILTIN) else markdown(model)
    card = rendered(
        "card.md",
        metadata=_metadata(named, task),
        title=target.repository.rpartition("/")[2],
        base_name=f"[{named}](https://huggingface.co/{named})"
        if named
        else base_name,  # names on the hub need no escaping
        dtype=config.model.dtype,
        base_loaded=named or f"path/to/{model}",
        repository=target.repository,
        revision=target.revision,
        iterations=data.summary.iterations,
        method=config.objective.kind,
        version=solrl_ray.__version__,
        warnings=data.summary.warnings,
        base=shown["base"],
        final=shown["final"],
        real=shown.get("real"),
        gain=gain,
        samples=data.summary.heldout_samples,
        rewards=[_reward(reward) for reward in config.rewards],
        gallery=gallery.cards,
        drawing=StockCall.of(config),
        lora_digest=data.summary.lora_digest,
        versions=data.summary.versions,
        settings=json.dumps(redacted(config), indent=1),
    )
    return {CARD: card.encode(), LORA_FILE: _lora(data.folder, data.summary, lora), **images}


def _pictures(data: RunData) -> tuple[Gallery, dict[str, bytes]]:
    """Images of the first seed of each prompt that has images of both policies, and the files to publish with them."""
    files: dict[str, bytes] = {}

    def publish(path: Path) -> str:
        content, kind = reduced(path, LONGEST)
        name = f"images/{path.parent.name}-{path.stem}.{kind}"
        files[name] = content
        return name

    pictures, shown = data.pictures, data.shown
    first = dict(sorted(pictures["base"].keys() & pictures["final"].keys(), reverse=True))
    sides = {"base": "base", "trained": "final"}
    seen = {key: path for key, path in pictures.get(REFERENCE, {}).items() if key[0] in first}
    chosen = {side: {key: pictures[name][key] for key in first.items()} for side, name in sides.items()}
    chosen = ({REFERENCE: seen} if seen else {}) | chosen
    scores = {side: shown[name].rewards for side, name in sides.items()}
    captions = {prompt: shown["final"].captions.get(prompt, prompt) for prompt in scores["trained"] if prompt in first}
    return Gallery.of(captions, chosen, scores, embed=publish), files


def _lora(run: Path, summary: Summary, folder: str) -> bytes:
    name = f"{folder}/{LORA_FILE}"
    file = run / name
    fix = "" if folder == "lora_best" else f"; solrl train --resume {run} writes it again"
    if not file.is_file():
        raise UserError(f"{run} has no {name}{fix}.")
    if not unchanged(run, name, summary):
        raise UserError(f"{file} has changed since {SUMMARY_FILE} was written{fix}.")
    return read_regular(file)


def _metadata(base: str | None, task: str) -> str:
    """YAML header of the model card, which the hub displays and indexes."""
    more: dict[str, Any] = {"base_model": base, "base_model_relation": "adapter"} if base else {}
    return ModelCardData(
        library_name="diffusers",
        pipeline_tag=task,
        tags=[task, "diffusers", "lora", "reinforcement-learning", "sol-rl"],
        **more,
    ).to_yaml()


def _reward(reward: RewardConfig) -> str:
    """Name of a reward, with its weight if that is not 1."""
    module, colon, function = reward.kind.rpartition(":")
    kind = f"{Path(module).name}:{function}" if colon else reward.kind
    return f"{reward.weight:g} × {kind}" if reward.weight != 1 else kind


def _name(path: str) -> str:
    """The last part of a path, also after ``builtin:``."""
    return Path(path.removeprefix(paths.BUILTIN)).name
