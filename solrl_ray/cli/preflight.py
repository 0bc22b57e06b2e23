"""What a run needs on disk, checked before anything is started: prompts, checkpoints, free space.

Also `model_facts`: the sizes that only the model's files can tell, read without loading a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from solrl_ray import models, rewards
from solrl_ray.common.deadlines import in_time
from solrl_ray.common.files import READ_SECONDS, lacks_space
from solrl_ray.config import compiled_learner
from solrl_ray.config.arithmetic import ModelFacts
from solrl_ray.config.checks import Problem, value_of
from solrl_ray.config.loading import Sources
from solrl_ray.config.pools import key_of, pools
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling, previews
from solrl_ray.errors import NotYetThere, UserError
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.quantization import capability
from solrl_ray.quantization.formats import FORMAT_OF_TIER, packed_bytes
from solrl_ray.quantization.scope import TIERS, UNQUANTIZED_TIERS
from solrl_ray.quantization.scope import plan as quantization_plan
from solrl_ray.records import Prompt
from solrl_ray.rewards import import_callable
from solrl_ray.storage.checkpoints import filesystem
from solrl_ray.storage.warm_start import warm_start

LARGE = 1_000_000_000
"""Parameters of a transformer that nobody wants to compute on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the checks read, so that nothing need be read twice."""

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    facts: ModelFacts
    notes: tuple[str, ...] = ()
    """What the user should know and may want, one sentence each."""


def check(config: Config, sources: Sources | None = None, *, planning: bool = False) -> Inputs:
    """Check everything a run reads or writes. Creates nothing, loads no weights, touches no device.

    With `planning` the run is not to start here: each reward's checkpoint or server that is missing is a note.

    Raises UserError: a prompt file that is missing or empty, too few prompts, held-out prompts among the training
    prompts, a checkpoint that is not there, a LoRA target that matches nothing, too little free space.
    """
    sources = sources or Sources()
    train, heldout = _prompts(config, sources)
    notes: list[str] = []
    _rewards(config, sources, (lambda missing: notes.append(f"before the run starts: {missing}")) if planning else None)
    facts = model_facts(config, sources)
    if note := _without_gpus(config, facts):
        notes.append(note)
    _space(config, sources)
    if config.run.init and not config.run.init_digest:  # once it has begun, a run has it in its own folder
        warm_start(config, sources)
    if config.checkpoints.upload:
        filesystem(config.checkpoints.upload, f"checkpoints.upload ({sources.of('checkpoints.upload')})")
    return Inputs(train=train, heldout=heldout, facts=facts, notes=(*notes, *_truncation(config, train + heldout)))


def _prompts(config: Config, sources: Sources) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    train = tuple(read_prompts(config.prompts.train, f"prompts.train ({sources.of('prompts.train')})"))
    heldout = tuple(read_prompts(config.prompts.heldout, f"prompts.heldout ({sources.of('prompts.heldout')})"))
    for key, prompts, file in (("rollout.prompts", train, "train"), ("evaluation.prompts", heldout, "heldout")):
        if value_of(config, key) > len(prompts):
            path = value_of(config, f"prompts.{file}")
            right = f"at most {len(prompts)}, the number of distinct prompts in prompts.{file}, {path}"
            raise UserError(Problem(key, right).sentence(config, sources))
    known = {prompt.id for prompt in train}
    shared = [prompt for prompt in heldout if prompt.id in known]
    if shared:
        raise UserError(
            f"prompts.heldout is {config.prompts.heldout} ({sources.of('prompts.heldout')}), and "
            f"{len(shared)} of its prompts are also in prompts.train, such as {shared[0].text!r}; "
            "an evaluation needs prompts that were never trained on."
        )
    return train, heldout


def _truncation(config: Config, prompts: tuple[Prompt, ...]) -> tuple[str, ...]:
    """A sentence for each tokenizer that cuts prompts off, with how many and the first of them."""
    found = models.family(config.model).truncated(config.model, [prompt.text for prompt in prompts])
    return tuple(
        f"{len(cut.texts):,} of {len(prompts):,} prompts are longer than the {cut.limit} tokens that "
        f"{cut.tokenizer} of {config.model.path} keeps and lose their end, such as {cut.texts[0][:60]!r}"
        for cut in found
        if cut.texts
    )


def _without_gpus(config: Config, facts: ModelFacts) -> str:
    """A sentence where a model of published size is given no GPU; else empty."""
    fleet = config.fleet
    lacking = [key_of(fleet, name) for name, pool in pools(fleet).items() if not pool.num_gpus]
    lacking += ["fleet.learners"] if not fleet.learners.num_gpus else []
    if not lacking or facts.parameters < LARGE:
        return ""
    return (
        f"num_gpus of {', '.join(lacking)} is 0, so {facts.parameters:,} parameters compute on CPUs there; "
        "configs/clusters/one_gpu.yaml has a GPU for all in turns"
    )


def _rewards(config: Config, sources: Sources, tell: Callable[[NotYetThere], None] | None) -> None:
    rewards.check(config.rewards, config.model.resolution, lambda key: f"{key} ({sources.of(key)})", tell=tell)
    if config.evaluation.reference:
        named = f"evaluation.reference ({sources.of('evaluation.reference')})"
        import_callable(config.evaluation.reference, named)


def _space(config: Config, sources: Sources) -> None:
    root = Path(config.run.root).expanduser().absolute()

    def reason() -> str:
        existing = next(folder for folder in (root, *root.parents) if folder.exists())
        return lacks_space(root, config.checkpoints.min_free_gb) if existing.is_dir() else f"{existing} is a file"

    named = f"run.root is {config.run.root} ({sources.of('run.root')})"
    if found := in_time(reason, what=f"{named}: looking at it", seconds=READ_SECONDS):
        raise UserError(f"{named}, but {found}.")


def model_facts(config: Config, sources: Sources | None = None) -> ModelFacts:
    """Sizes of the model and its adapter, from the checkpoint's configuration alone.

    Raises UserError if the checkpoint is not there, if an entry of ``model.lora.targets`` matches nothing, or
    if the preview tier is not one of this version's or would quantise nothing.
    """
    sources = sources or Sources()
    skeleton = models.family(config.model).skeleton(config.model, f"model.path ({sources.of('model.path')})")
    linears = {path: module for path, module in skeleton.named_modules() if isinstance(module, nn.Linear)}
    adapted = {path for path in linears if _is_target(path, config.model.lora.targets)}
    for target in config.model.lora.targets:
        if not any(_is_target(path, [target]) for path in adapted):
            raise UserError(
                f"model.lora.targets ({sources.of('model.lora.targets')}) names {target!r}, but no linear of "
                f"{config.model.path} ends with it."
            )
    rank, quantized = config.model.lora.rank, _quantized(config, sources, linears)
    model = models.load(config.model, "cpu", components=())
    recomputed, activations = model.activation_bytes(skeleton, compiled=compiled_learner.is_compiled(config))
    return ModelFacts(
        latent_shape=model.latent_shape,
        recomputed_bytes=recomputed,
        activation_bytes=activations,
        parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        lora_modules=len(adapted),
        lora_parameters=sum(rank * (linears[p].in_features + linears[p].out_features) for p in adapted),
        packed_tiers=tuple(sorted({quantized[path] for path in adapted & quantized.keys()})),
        packed_bytes=sum(
            packed_bytes(FORMAT_OF_TIER[quantized[path]], linears[path].out_features, linears[path].in_features)
            for path in adapted & quantized.keys()
        ),
    )


def _quantized(config: Config, sources: Sources, linears: Mapping[str, nn.Linear]) -> dict[str, str]:
    """Paths of the linears that explorers quantise → their tier."""
    wanted, key = pool_sampling(config).tier, f"({sources.of('rollout.explore.precision')})"
    device = torch.device("cuda" if config.fleet.explorers.num_gpus else "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        # Nobody here knows what the explorers' cards can do; FP8 is the larger of what they may pack.
        tier: str = "fp8" if wanted == "auto" else wanted
    else:
        tier = capability.resolve(wanted, device, config.model.dtype)
        levels = [preview.precision for preview in previews(config)[1:]]
        for own in dict.fromkeys((tier, *config.model.quantization.tiers.values(), *levels)):
            reason = capability.lacks(own, device)
            if reason and tier not in UNQUANTIZED_TIERS:
                others = {"model.quantization.tiers": config.model.quantization.tiers, "fidelity.fallback": levels}
                said = [f"rollout.explore.precision is {wanted!r} {key}"]
                said += [f"{other} {tiers}" for other, tiers in others.items() if tiers]
                raise UserError(
                    f"{', '.join(said)}: {reason}, and explorers run on {capability.device_name(device)}; there "
                    f"is {', '.join(capability.available(device))}, or bf16 or float32 unquantised."
                )
    if tier not in TIERS:
        raise UserError(f"rollout.explore.precision is {tier!r} {key}; this version runs {', '.join(TIERS)}.")
    quantized = quantization_plan(linears, tier, config.model.quantization).tiers
    if not quantized and tier not in UNQUANTIZED_TIERS:
        raise UserError(
            f"model.quantization leaves no linear of {config.model.path} to quantise; skip fewer names than "
            f"{', '.join(config.model.quantization.skip) or 'none'}, or set min_features lower than "
            f"{config.model.quantization.min_features}."
        )
    return quantized


def _is_target(path: str, targets: list[str]) -> bool:
    """PEFT's rule for a list of `target_modules`: the whole path or its end after a dot."""
    return any(path == target or path.endswith(f".{target}") for target in targets)
