"""Checks what a run needs on disk before anything starts: prompts, checkpoints, free space.

Also `model_facts`: sizes from the model's files, read without loading a weight.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import torch
from torch import nn

from solrl_ray import models, rewards
from solrl_ray.cli.outline import Inputs, checked_prompts, facts_of, preview_tier, without_gpus
from solrl_ray.common.deadlines import in_time
from solrl_ray.common.files import READ_SECONDS, lacks_space, located
from solrl_ray.config import own_functions
from solrl_ray.config.arithmetic import ModelFacts
from solrl_ray.config.loading import Sources
from solrl_ray.config.schema import Config
from solrl_ray.errors import NotYetThere, UserError
from solrl_ray.models.blocks import blocks
from solrl_ray.models.shapes import ModelShapes, TextEncoderSize
from solrl_ray.records import Prompt
from solrl_ray.rewards import import_callable, trial
from solrl_ray.storage.checkpoints import filesystem
from solrl_ray.storage.warm_start import warm_start

TOKENIZED = 20_000
"""Prompts whose tokens are counted, the longest ones: some 15 s and 0.4 GB."""


def check(config: Config, sources: Sources | None = None, *, planning: bool = False, elsewhere: bool = False) -> Inputs:
    """Check everything a run reads or writes. Creates nothing, loads no weights, touches no device.

    With `planning`, the run does not start here: a reward's missing checkpoint or server is a note. With `elsewhere`,
    the run uses no card of this machine.

    Raises UserError: a prompt file that is missing or empty, too few prompts, held-out prompts among the training
    prompts, a missing checkpoint, a LoRA target that matches nothing, too little free space.
    """
    sources = sources or Sources()
    train, heldout = checked_prompts(config, sources)
    notes: list[str] = []
    _reference(config, sources, heldout)
    _rewards(config, sources, (lambda missing: notes.append(f"before the run starts: {missing}")) if planning else None)
    facts = model_facts(config, sources, elsewhere=elsewhere)
    if note := without_gpus(config, facts):
        notes.append(note)
    _space(config, sources)
    if config.run.init and not config.run.init_digest:  # a run that has begun has a copy in its own folder
        warm_start(config, sources)
    if config.checkpoints.upload:
        filesystem(config.checkpoints.upload, f"checkpoints.upload ({sources.of('checkpoints.upload')})")
    return Inputs(train=train, heldout=heldout, facts=facts, notes=(*notes, *_truncation(config, train + heldout)))


def _truncation(config: Config, prompts: tuple[Prompt, ...]) -> tuple[str, ...]:
    """A sentence for each tokenizer that truncates prompts, with their number and the first one."""
    texts, which = [prompt.text for prompt in prompts], f"{len(prompts):,}"
    if len(texts) > TOKENIZED:
        texts, which = heapq.nlargest(TOKENIZED, texts, key=len), f"the {TOKENIZED:,} longest of {which}"
    found = models.family(config.model).truncated(config.model, texts)
    return tuple(
        f"{len(cut.texts):,} of {which} prompts are longer than the {cut.limit} tokens that "
        f"{cut.tokenizer} of {config.model.path} keeps and lose their end, such as {cut.texts[0][:60]!r}"
        for cut in found
        if cut.texts
    )


def _rewards(config: Config, sources: Sources, tell: Callable[[NotYetThere], None] | None) -> None:
    rewards.check(config.rewards, config.model.resolution, lambda key: f"{key} ({sources.of(key)})", tell=tell)


def _reference(config: Config, sources: Sources, heldout: tuple[Prompt, ...]) -> None:
    """Of the user's own functions only the import; `try_own_functions` tries them in a process of their own."""
    evaluation = config.evaluation
    named = f"evaluation.reference ({sources.of('evaluation.reference')})"
    if own_functions.is_shipped(evaluation.reference):
        prompts = (heldout[0].text, heldout[-1].text)
        trial.here([own_functions.Trial(named, evaluation, config.model.resolution, prompts)], "cpu")
    elif evaluation.reference:
        import_callable(evaluation.reference, named, evaluation._own)


def _space(config: Config, sources: Sources) -> None:
    root = located(config.run.root, "run.root").absolute()

    def reason() -> str:
        existing = next(folder for folder in (root, *root.parents) if folder.exists())
        return lacks_space(root, config.checkpoints.min_free_gb) if existing.is_dir() else f"{existing} is a file"

    named = f"run.root is {config.run.root} ({sources.of('run.root')})"
    if found := in_time(reason, what=f"{named}: looking at it", seconds=READ_SECONDS):
        raise UserError(f"{named}, but {found}.")


def model_facts(config: Config, sources: Sources | None = None, *, elsewhere: bool = False) -> ModelFacts:
    """Sizes of the model and its adapter, from the checkpoint's configuration alone; `elsewhere` as for `check`.

    Raises UserError if the checkpoint is missing, an entry of ``model.lora.targets`` matches nothing, or the preview
    tier is unknown or would quantise nothing.
    """
    sources = sources or Sources()
    family, model = models.family(config.model), config.model
    skeleton = family.skeleton(model, f"model.path ({sources.of('model.path')})")
    transformer, factor = family.settings(model)
    shapes = ModelShapes(
        family=model.family,
        transformer=transformer,
        factor=factor,
        blocks=len(blocks(skeleton)),
        parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        buffers=sum(buffer.numel() for buffer in skeleton.buffers()),
        linears={path: module for path, module in skeleton.named_modules() if isinstance(module, nn.Linear)},
        texts=[text_encoder_size(each) for each in family.text_skeletons(model).values()],
    )
    device = torch.device("cuda" if config.fleet.explorers.num_gpus else "cpu")
    known = not elsewhere and (device.type == "cpu" or torch.cuda.is_available())
    return facts_of(config, sources, shapes, preview_tier(config, sources, device if known else None))


def text_encoder_size(encoder: nn.Module) -> TextEncoderSize:
    """Of a text encoder, with or without memory."""
    tables = nn.ModuleList([each for each in encoder.modules() if isinstance(each, nn.Embedding)])
    parameters, in_tables = (sum(parameter.numel() for parameter in each.parameters()) for each in (encoder, tables))
    return TextEncoderSize(parameters, parameters - in_tables)
