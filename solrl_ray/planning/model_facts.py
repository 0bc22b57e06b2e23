"""Facts from the files of a run's model: its sizes, and the prompts that its tokenizers truncate."""

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
"""Maximum number of prompts to tokenize, the longest ones first: about 15 s and 0.4 GB."""


def model_facts(config: Config, sources: Sources | None = None, *, elsewhere: bool = False) -> ModelFacts:
    """Sizes of the model and its adapter, from the checkpoint's configuration files; reads no weights.

    `elsewhere`: The run will not use the GPUs of this machine.

    Raises UserError if the checkpoint is missing, an entry of ``model.lora.targets`` matches no layer, or the preview
    tier is unknown or would quantise no layer.
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
        texts=[parameters(encoder) for encoder in family.text_skeletons(model).values()],
    )
    device = torch.device("cuda" if config.fleet.explorers.num_gpus else "cpu")
    known = not elsewhere and (device.type == "cpu" or torch.cuda.is_available())
    return outline.facts_of(config, sources, shapes, outline.preview_tier(config, sources, device if known else None))


def parameters(module: torch.nn.Module) -> int:
    """Number of parameters of a module, which may be on the meta device."""
    return sum(parameter.numel() for parameter in module.parameters())


def truncation(config: Config, prompts: tuple[Prompt, ...]) -> tuple[str, ...]:
    """A sentence for each tokenizer that truncates prompts, with their number and the first of them."""
    texts, least = [prompt.text for prompt in prompts], ""
    if len(texts) > TOKENIZED:
        texts = heapq.nlargest(TOKENIZED, texts, key=len)
        least = f"at least (only the {TOKENIZED:,} longest were counted) "
    from solrl_ray import models

    truncated = models.family(config.model).truncated(config.model, texts)
    return tuple(
        f"{least}{len(cut.texts):,} of {len(prompts):,} prompts are longer than the {cut.limit} tokens that "
        f"{cut.tokenizer} of {config.model.path} keeps and are truncated, such as {cut.texts[0][:60]!r}"
        for cut in truncated
        if cut.texts
    )
