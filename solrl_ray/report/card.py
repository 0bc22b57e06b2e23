"""``solrl push``: the model card of a finished run, and the folder to publish: LoRA, card and pictures.

It tells nothing about the machine: local paths are reduced to their last name.
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
"""Limit of a picture's sides, pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    repository: str
    """``owner/name`` on the hub."""
    revision: str | None
    """A branch; None: the main one."""


def hub_id(model: str) -> str | None:
    """The hub's id of a checkpoint; None if it is a folder or comes with the package."""
    place = paths.resolve(model)
    return place if isinstance(place, str) else None


def contents(data: RunData, target: Target, *, lora: str = "lora") -> dict[str, bytes]:
    """File → content of what is published.

    `lora`: folder of the weights, ``lora`` or (with `RunData.at_best`) ``lora_best``.

    Raises UserError: the run has not ended or was not evaluated, or its LoRA file has changed since its summary.
    """
    shown, gain = data.shown, data.gain
    if data.summary is None or gain is None:
        done, planned = len(data.iterations), data.config.run.iterations
        raise UserError(
            f"{data.folder} has not ended: it has made {done} of {planned} iterations; solrl train --resume "
            f"{data.folder} goes on with it."
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
        base_name=f"[{named}](https://huggingface.co/{named})" if named else base_name,  # the hub's names need no more
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
        pictures=gallery.cards,
        drawing=StockCall.of(config),
        lora_digest=data.summary.lora_digest,
        versions=data.summary.versions,
        settings=json.dumps(redacted(config), indent=1),
    )
    return {CARD: card.encode(), LORA_FILE: _lora(data.folder, data.summary, lora), **images}


def _pictures(data: RunData) -> tuple[Gallery, dict[str, bytes]]:
    """The first seed's pictures of each prompt with pictures of both policies; and the files."""
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
    mend = "" if folder == "lora_best" else f"; solrl train --resume {run} writes it again"
    if not file.is_file():
        raise UserError(f"{run} has no {name}{mend}.")
    if not unchanged(run, name, summary):
        raise UserError(f"{file} has changed since {SUMMARY_FILE} was written{mend}.")
    return read_regular(file)


def _metadata(base: str | None, task: str) -> str:
    """The card's header, YAML, which the hub shows and searches."""
    more: dict[str, Any] = {"base_model": base, "base_model_relation": "adapter"} if base else {}
    return ModelCardData(
        library_name="diffusers",
        pipeline_tag=task,
        tags=[task, "diffusers", "lora", "reinforcement-learning", "sol-rl"],
        **more,
    ).to_yaml()


def _reward(reward: RewardConfig) -> str:
    module, colon, function = reward.kind.rpartition(":")
    kind = f"{Path(module).name}:{function}" if colon else reward.kind
    return f"{reward.weight:g} × {kind}" if reward.weight != 1 else kind


def _name(path: str) -> str:
    """The last part of a path or a ``builtin:`` one."""
    return Path(path.removeprefix(paths.BUILTIN)).name
