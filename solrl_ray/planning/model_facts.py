"""What the files of a run's model tell: its sizes, and the prompts that its tokenizers cut."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from solrl_ray.config.loading import Sources
from solrl_ray.config.schema import Config
from solrl_ray.models.shapes import ModelShapes
from solrl_ray.planning import outline
from solrl_ray.planning.arithmetic import ModelFacts
from solrl_ray.records import Prompt

if TYPE_CHECKING:
    import torch

TOKENIZED = 20_000
"""Prompts whose tokens are counted, the longest ones: some 15 s and 0.4 GB."""


def model_facts(config: Config, sources: Sources | None = None, *, elsewhere: bool = False) -> ModelFacts:
    """Sizes of the model and its adapter, from the checkpoint's configuration alone; `elsewhere` as of a run.

    Raises UserError if the checkpoint is missing, an entry of ``model.lora.targets`` matches nothing, or the preview
    tier is unknown or would quantise nothing.
    """
    import torch
    from torch import nn

    from solrl_ray import models
    from solrl_ray.models.components import blocks

    sources = sources or Sources()
    family, model = models.family(config.model), config.model
    skeleton = family.skeleton(model, sources.named("model.path"))
    transformer, factor = family.settings(model, sources.named)
    shapes = ModelShapes(
        family=model.family,
        transformer=transformer,
        factor=factor,
        blocks=len(blocks(skeleton)),
        parameters=parameters(skeleton),
        buffers=sum(buffer.numel() for buffer in skeleton.buffers()),
        linears={path: module for path, module in skeleton.named_modules() if isinstance(module, nn.Linear)},
        texts=[parameters(each) for each in family.text_skeletons(model).values()],
    )
    device = torch.device("cuda" if config.fleet.explorers.num_gpus else "cpu")
    known = not elsewhere and (device.type == "cpu" or torch.cuda.is_available())
    return outline.facts_of(config, sources, shapes, outline.preview_tier(config, sources, device if known else None))


def parameters(module: torch.nn.Module) -> int:
    """Of a module, with or without memory."""
    return sum(parameter.numel() for parameter in module.parameters())


def truncation(config: Config, prompts: tuple[Prompt, ...]) -> tuple[str, ...]:
    """A sentence for each tokenizer that truncates prompts, with their number and the first one."""
    texts, least = [prompt.text for prompt in prompts], ""
    if len(texts) > TOKENIZED:
        texts = heapq.nlargest(TOKENIZED, texts, key=len)
        least = f"at least (only the {TOKENIZED:,} longest were counted) "
    from solrl_ray import models

    found = models.family(config.model).truncated(config.model, texts)
    return tuple(
        f"{least}{len(cut.texts):,} of {len(prompts):,} prompts are longer than the {cut.limit} tokens that "
        f"{cut.tokenizer} of {config.model.path} keeps and lose their end, such as {cut.texts[0][:60]!r}"
        for cut in found
        if cut.texts
    )
