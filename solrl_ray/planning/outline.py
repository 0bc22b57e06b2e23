"""Sizes of a model for a plan, and the precision tier of its previews, computed from the model's shapes. Needs neither
PyTorch nor the network nor a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from solrl_ray.common.module_paths import ends_in
from solrl_ray.config import compiled_learner, reward_kinds
from solrl_ray.config.loading import Sources
from solrl_ray.config.pools import pools
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import UNQUANTIZED_TIERS, pool_sampling
from solrl_ray.errors import UserError
from solrl_ray.models import FAMILIES, paths
from solrl_ray.models.shapes import DTYPE_BYTES, ModelShapes, shipped
from solrl_ray.planning.arithmetic import ModelFacts
from solrl_ray.quantization import capability, planning
from solrl_ray.quantization.planning import FORMAT_OF_TIER, Linear, packed_bytes

if TYPE_CHECKING:
    import torch

LARGE = 1_000_000_000
"""Parameters from which a transformer is too large for CPUs."""


def shipped_facts(config: Config, sources: Sources) -> ModelFacts | None:
    """Sizes of a model and its adapter from shapes in this package; None if its shapes are not in the package but its
    checkpoint is on this machine.

    Raises `UserError` for impossible sizes, rewards, LoRA targets and tiers, and for a model with neither shapes nor
    checkpoint.
    """
    shapes, family = shipped(config.model), FAMILIES.get(config.model.family)
    if shapes is None or family is None:
        if not _is_local(config.model.path, "model.path"):
            path = config.model.path
            raise UserError(
                f"{sources.named('model.path')} is {path!r}, which is neither on this machine nor a model "
                f"whose shapes are in this package; `hf download {path} --include '*.json'` downloads the files that a "
                "plan needs."
            )
        return None
    for position, reward in enumerate(config.rewards):
        keys = _keys(sources, f"rewards.{position}")
        reward_kinds.check(reward, keys)
        reward_kinds.check_frames(reward, keys, config.model.shapes[0].frames)
    if shapes.family != config.model.family:
        named = f"model.family is {config.model.family!r} ({sources.of('model.family')})"
        raise UserError(f"{named}, but {config.model.path} is of family {shapes.family!r}.")
    family.SIZES.check(config.model, shapes.transformer, shapes.factor, sources.named)
    tier = preview_tier(config, sources, None if config.fleet.explorers.num_gpus else "cpu")
    return facts_of(config, sources, shapes, tier)


def missing(config: Config) -> dict[str, str]:
    """Keys of files and checkpoints that are not on this machine → their paths or ids."""
    given = {f"prompts.{name}": config.value_of(f"prompts.{name}") for name in ("train", "heldout")}
    given |= {"model.path": config.model.path}
    given |= {f"rewards.{i}.{key}": getattr(r, key) for i, r in enumerate(config.rewards) for key in ("path", "base")}
    return {key: path for key, path in given.items() if path and not _is_local(path, key)}


def _is_local(path: str, key: str) -> bool:
    resolved = paths.resolve(path)
    if isinstance(resolved, Path):
        return resolved.exists()
    if key.startswith("prompts."):
        return False
    from huggingface_hub.constants import HF_HUB_CACHE

    return (Path(HF_HUB_CACHE) / f"models--{resolved.replace('/', '--')}").is_dir()


def _keys(sources: Sources, entry: str) -> Callable[[str], str]:
    """Returns a function from a field of the entry to its key with its source, for messages."""
    return lambda field: sources.named(f"{entry}.{field}")


def without_gpus(config: Config, facts: ModelFacts) -> str:
    """A sentence if a large model has workers without GPUs; else empty."""
    fleet = config.fleet
    lacking = [f"fleet.{name}" for name, pool in pools(fleet).items() if not pool.num_gpus]
    lacking += ["fleet.learners"] if not fleet.learners.num_gpus else []
    if not lacking or facts.parameters < LARGE:
        return ""
    return (
        f"num_gpus of {', '.join(lacking)} is 0, so a model of {facts.parameters:,} parameters runs on CPUs there; "
        "the preset one_gpu puts all workers on a GPU"
    )


def facts_of(config: Config, sources: Sources, shapes: ModelShapes, tier: str) -> ModelFacts:
    """Sizes of a model and its adapter, with explorers in the precision tier `tier`.

    Raises `UserError` if an entry of ``model.lora.targets`` matches no layer, the tier would quantise no layer, or
    previews decode frames that the videos do not have.
    """
    model, linears = config.model, shapes.linears
    _check_preview(config, sources)
    adapted = {path for path in linears if ends_in(path, model.lora.targets)}
    for target in model.lora.targets:
        if not any(ends_in(path, [target]) for path in adapted):
            raise UserError(
                f"{sources.named('model.lora.targets')} has {target!r}, but no linear of {model.path} ends with it."
            )
    quantized, sizes = _quantized(config, linears, tier), FAMILIES[model.family].SIZES
    recomputed, activations = sizes.activation_bytes(
        model, shapes.transformer, shapes.factor, blocks=shapes.blocks, compiled=compiled_learner.is_compiled(config)
    )
    forward, decoding = sizes.sampling_bytes(model, shapes.transformer, shapes.factor)
    tokens = sizes.tokens(model, model.shapes.smallest, shapes.factor)
    streams = shapes.blocks + sum(path.endswith(".add_q_proj") for path in linears)
    packed = {p: packed_bytes(FORMAT_OF_TIER[tier], linears[p].out_features, linears[p].in_features) for p in quantized}
    touched = {path: _weights(linears[path]) for path in adapted}
    return ModelFacts(
        latent_shape=sizes.latent_shape(model.shapes.largest, shapes.transformer, shapes.factor),
        recomputed_bytes=recomputed,
        activation_bytes=activations,
        tokens=tokens,
        streams=streams,
        # With two streams, a weight processes the tokens of only one of them: half of the tokens on average.
        stream_flops=2 * shapes.parameters * tokens * shapes.blocks // max(1, streams) ** 2,
        forward_bytes=forward,
        decoding_bytes=decoding,
        memory_is_known=sizes.estimate_memory,
        decoder_parameters=sizes.decoder_of(shapes.factor).parameters,
        parameters=shapes.parameters,
        buffers=shapes.buffers,
        lora_modules=len(adapted),
        lora_parameters=sum(model.lora.rank * (linears[p].in_features + linears[p].out_features) for p in adapted),
        packed_tier=tier,
        packed_bytes=sum(packed[path] for path in adapted & quantized),
        touched_parameters=sum(touched.values()),
        plain_touched_parameters=sum(touched[path] for path in adapted - quantized),
        quantized_parameters=sum(_weights(linears[path]) for path in quantized),
        explorer_bytes=_explorer_bytes(config, shapes, tier, packed),
        text_parameters=sum(shapes.texts),
        embedding_bytes=sizes.embedding_bytes(model, shapes.transformer, shapes.factor),
    )


def _check_preview(config: Config, sources: Sources) -> None:
    """Raise `UserError` for latent frames that the videos do not have, or that are the same for all seeds."""
    chosen, model, key = config.rollout.preview.latent_frames, config.model, "rollout.preview.latent_frames"
    sizes = FAMILIES[model.family].SIZES
    frames = sizes.latent_frames(model.shapes[0])
    if chosen == [0] and model.references and not sizes.adds_references:
        raise UserError(
            f"{sources.named(key)} is [0], but with model.family {model.family!r} the first latent frame is (nearly) "
            "the prompt's reference image for every seed; add later frames, such as [0, 1]."
        )
    if chosen and chosen[-1] >= frames:
        raise UserError(
            f"{sources.named(key)} is {chosen}, but {model.frames} frames (model.frames) are {frames} "
            f"latent frames, 0 to {frames - 1}."
        )


def _weights(linear: Linear) -> int:
    return linear.in_features * linear.out_features


def _explorer_bytes(config: Config, shapes: ModelShapes, tier: str, packed: Mapping[str, int]) -> int:
    """Bytes of an explorer's transformer. Emulated layers also hold their operand in bfloat16."""
    weights = sum(_weights(shapes.linears[path]) for path in packed)
    operands = weights * (tier == "nvfp4-emulated")
    plain = (shapes.parameters + shapes.buffers - weights) * DTYPE_BYTES[config.model.dtype]
    return plain + sum(packed.values()) + operands * DTYPE_BYTES["bfloat16"]


def preview_tier(config: Config, sources: Sources, device: torch.device | str | None) -> str:
    """The tier of `rollout.explore.precision` on `device`; None: an unknown GPU.

    Raises `UserError` if the device does not support the tier.
    """
    wanted = pool_sampling(config).tier
    if device is None:
        return "fp8" if wanted == "auto" else wanted  # the larger of the possible formats
    tier = capability.resolve(wanted, device, config.model.dtype)
    reason = capability.lacks(tier, device)
    if reason and tier not in UNQUANTIZED_TIERS:
        given = f"rollout.explore.precision is {wanted!r} ({sources.of('rollout.explore.precision')})"
        available = f"{', '.join(capability.available(device))}, or bf16 or float32 unquantised"
        if not config.fleet.explorers.num_gpus:
            raise UserError(
                f"{given}: {reason}, and explorers have no GPU (fleet.explorers.num_gpus is 0). Name a clusters "
                f"preset, such as one_gpu_80gb, or set it to a tier of CPUs: {available}."
            )
        raise UserError(
            f"{given}: {reason}, and explorers run on {capability.device_name(device)}; set it to {available}."
        )
    return tier


def _quantized(config: Config, linears: Mapping[str, Linear], tier: str) -> set[str]:
    quantized = set(planning.plan(linears, tier, config.model.quantization).quantized)
    if not quantized and tier not in UNQUANTIZED_TIERS:
        raise UserError(
            f"model.quantization leaves no linear layer of {config.model.path} to quantise. Shorten "
            f"model.quantization.skip ({', '.join(config.model.quantization.skip) or 'empty'}), or set "
            f"model.quantization.min_features below {config.model.quantization.min_features}."
        )
    return quantized
