"""Compiled forwards: the repeated blocks of a transformer are compiled one by one, at fixed shapes, and cached.

Blocks of one class share one compiled function, so compiling takes seconds instead of minutes for the whole network.
Weights are inputs of compiled code, so a revision written in place takes effect without recompilation. A decoder is
compiled as a whole, because its blocks differ in size.

The attention kernel is chosen at compile time, but PyTorch's cache keys do not include the switches that choose it. A
process with cuDNN's attention off could load code that another process compiled with it. So we add the choice to the
keys: make it (`models.attention`) before anything is compiled, and call `prepare` again when it changes. All roles
share one cache folder: a process can have only one, and any of a GPU's roles may compile first.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import nn

from solrl_ray.common.files import located
from solrl_ray.config.resolution import MOST
from solrl_ray.config.schema import Compile
from solrl_ray.config.strategies import UNQUANTIZED_TIERS
from solrl_ray.errors import UserError
from solrl_ray.models import attention
from solrl_ray.models.components import blocks
from solrl_ray.quantization.gelu import use_sigmoid_gelu_

VARIANTS = 32 * MOST
"""Largest number of compiled variants per block class; more is an error. Each shape of samples needs at most three
kinds of block (SD3.5-Medium) in ten kinds of forward (previews, samples, evaluations, the probe, five kinds of learner
passes). Guidance has one batch size, even outside its interval (`DiffusionModel.velocity`).
"""
EAGER_TIERS = ("nvfp4-emulated",)
"""Tiers that are never compiled: emulation guarantees the reference's bits, and a compiler may divide differently."""


def compiles(settings: Compile, device: torch.device, tier: str) -> bool:
    """Whether forwards of `tier` are compiled on this device."""
    wanted = device.type == "cuda" if settings.enabled is None else settings.enabled
    return wanted and tier not in EAGER_TIERS


def compile_(transformer: nn.Module, settings: Compile, device: torch.device, tier: str) -> str:
    """Set up the blocks of a transformer to be compiled at their first call; returns a description of what was done.

    In a quantised transformer, GELUs are replaced by a form that compiles to faster code (`use_sigmoid_gelu_`).

    Shapes are fixed: each new batch size or text length compiles again. Call this after `quantize_`.

    Raises UserError if there is nothing to compile.
    """
    if not compiles(settings, device, tier):
        return f"no: tier {tier} keeps the reference's bits" if tier in EAGER_TIERS else _not_enabled(settings)
    repeated = blocks(transformer)
    if not repeated:
        raise UserError(f"compile.enabled is true, but {type(transformer).__name__} has no list of blocks to compile")
    mode = prepare(settings)
    if tier not in UNQUANTIZED_TIERS:
        use_sigmoid_gelu_(transformer)
    for block in repeated:
        # With fullgraph, too many variants raise an error instead of running uncompiled.
        block.compile(fullgraph=tier != "nvfp4", dynamic=False, mode=mode)
    return f"{len(repeated)} blocks, mode {settings.mode}"


def compile_learner(transformer: nn.Module, settings: Compile, device: torch.device, activation_memory: float) -> str:
    """Set up the blocks of a transformer, with their backward passes, to be compiled at their first call.

    Returns a description of what was done. Call this after `policy.adapters.attach` and
    `attention.choose_for_training`. Blocks are compiled once per adapter in use, with and without gradient, and per
    shape.

    `activation_memory`: share of the activations that a forward keeps for its backward pass, in [0, 1]; set for the
    whole process.

    Raises UserError if there is nothing to compile, or no compiler.
    """
    repeated = blocks(transformer)
    lacking = _lacking_compiler(device) if repeated else f"{type(transformer).__name__} has no list of blocks"
    if lacking:
        value = "true" if settings.learner else "null, which on a GPU is true"
        raise UserError(f"compile.learner is {value}, but nothing can be compiled: {lacking}; set it to false")
    mode = prepare(settings)
    torch._functorch.config.activation_memory_budget = activation_memory
    for block in repeated:
        block.compile(fullgraph=True, dynamic=False, mode=mode)
    return (
        f"{len(repeated)} blocks, mode {settings.mode}, activation memory {activation_memory:g}, "
        f"{attention.kernels()} attention"
    )


def _lacking_compiler(device: torch.device) -> str:
    """The requirement of the compiler for this device that this machine does not meet; empty if it meets all."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton  # late, like the import below: it imports the compiler

        return "" if has_triton() else "Triton is not installed, or finds no GPU"
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "there is no C++ compiler (environment variable CXX)"
    return ""


def compile_decoder(autoencoder: nn.Module, settings: Compile, device: torch.device) -> str:
    """Set up an autoencoder's decoder to be compiled at its first call, if `compile.decoder` is set.

    Returns a description of what was done. Each new batch size compiles again, and with tiling each tile size.
    """
    if not settings.decoder:
        return "no: compile.decoder is false"
    if not compiles(settings, device, ""):
        return _not_enabled(settings)
    decoder = autoencoder.get_submodule("decoder")
    decoder.compile(fullgraph=True, dynamic=False, mode=prepare(settings))
    return f"{type(decoder).__name__}, mode {settings.mode}"


def what_compiles(*descriptions: str) -> str:
    """The descriptions from `compile_` and `compile_decoder` of the parts that are compiled; empty if none is."""
    return "; ".join(description for description in descriptions if not description.startswith("no: "))


def cache_folder(configured: str) -> Path:
    """Folder for compiled code, kept between runs: `configured`, else a folder in the user's cache folder."""
    if configured:
        return located(configured, "compile.cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "solrl_ray" / "compiled"


def _not_enabled(settings: Compile) -> str:
    return f"no: compile.enabled is {'false' if settings.enabled is False else 'not true, and this is no GPU'}"


def prepare(settings: Compile) -> str | None:
    """Set up the compiler for the attention kernels in use; returns the mode as `torch.compile` takes it."""
    _use_cache(settings.cache)
    tag = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    torch.compiler.config.cache_key_tag = f"{tag}{attention.kernels()}-attention"
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = VARIANTS
    return None if settings.mode == "default" else settings.mode


def _use_cache(configured: str) -> None:
    folder = cache_folder(configured)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"compile.cache: the folder {folder} cannot be created: {error.strerror}. Choose a folder you can write to."
        ) from error
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        if _is_pytorchs_own(os.environ.get(variable, "")):
            os.environ[variable] = str(folder / name)


def _is_pytorchs_own(folder: str) -> bool:
    """Whether the user did not choose this cache folder: it is empty, or PyTorch's default in the system's temporary
    folder. PyTorch writes its default into the environment, for example when a model library is imported.
    """
    default = Path(tempfile.gettempdir()).absolute()
    return not folder or any(
        part.parent == default and part.name.startswith("torchinductor_")
        for part in (Path(folder).absolute(), *Path(folder).absolute().parents)
    )
