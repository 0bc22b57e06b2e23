"""Compiled forwards: the repeated blocks of a transformer one by one, at fixed shapes, cached between runs.

Blocks of one class share one compiled function, which takes seconds instead of the minutes for the whole network.
Weights are inputs of compiled code, so a revision written in place takes effect without compiling again. A decoder is
compiled as a whole: its blocks differ in size.

The attention kernel is chosen at compile time, but PyTorch's cache keys do not contain the switches: a process with
cuDNN's attention off would run it in another's compiled code. So we add the choice to the keys: it must be made
(`models.attention`) before anything is compiled, and `prepare` called again when it changes. The folder is one for all:
a process has one, and which of a card's roles compiles first is not always the same.
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
"""Compiled variants of one block class before it is an error: of each shape of samples three kinds of block
(SD3.5-Medium's) in at most ten forwards (a preview, a sample, an evaluated one and the probe, and five kinds of learner
passes). Guidance has one size of forward, also where it does not act (`DiffusionModel.velocity`).
"""
EAGER_TIERS = ("nvfp4-emulated",)
"""Not compiled: the emulation promises the reference's bits, and a compiler may divide differently."""


def compiles(settings: Compile, device: torch.device, tier: str) -> bool:
    """Whether forwards of `tier` are compiled on this device."""
    wanted = device.type == "cuda" if settings.enabled is None else settings.enabled
    return wanted and tier not in EAGER_TIERS


def compile_(transformer: nn.Module, settings: Compile, device: torch.device, tier: str) -> str:
    """Set the blocks of a transformer to be compiled at their first call; returns what was done, in words.

    A quantised transformer gets GELUs that compile to less (`use_sigmoid_gelu_`).

    Shapes are fixed: each new batch size or text length compiles again. Call after `quantize_`.

    Raises UserError: there is nothing to compile.
    """
    if not compiles(settings, device, tier):
        return f"no: tier {tier} keeps the reference's bits" if tier in EAGER_TIERS else _not_enabled(settings)
    found = blocks(transformer)
    if not found:
        raise UserError(f"compile.enabled is true, but {type(transformer).__name__} has no list of blocks to compile")
    mode = prepare(settings)
    if tier not in UNQUANTIZED_TIERS:
        use_sigmoid_gelu_(transformer)
    for block in found:
        # With fullgraph, a variant too many raises an error instead of running uncompiled.
        block.compile(fullgraph=tier != "nvfp4", dynamic=False, mode=mode)
    return f"{len(found)} blocks, mode {settings.mode}"


def compile_learner(transformer: nn.Module, settings: Compile, device: torch.device, activation_memory: float) -> str:
    """Set the blocks of a transformer to be compiled, with their backward passes, at their first call; returns what was
    done, in words. Call after `policy.adapters.attach` and `attention.choose_for_training`.

    Blocks are compiled once for each adapter in use, with and without gradient, and for each shape.

    `activation_memory`: share of the activations that forwards keep for backward passes, in [0, 1]. Set for the whole
    process. Raises UserError: there is nothing to compile, or no compiler.
    """
    found = blocks(transformer)
    lacking = _lacking_compiler(device) if found else f"{type(transformer).__name__} has no list of blocks"
    if lacking:
        chosen = "true" if settings.learner else "null, which on a GPU is true"
        raise UserError(f"compile.learner is {chosen}, but nothing can be compiled: {lacking}; set it to false")
    mode = prepare(settings)
    torch._functorch.config.activation_memory_budget = activation_memory
    for block in found:
        block.compile(fullgraph=True, dynamic=False, mode=mode)
    return (
        f"{len(found)} blocks, mode {settings.mode}, activation memory {activation_memory:g}, "
        f"{attention.kernels()} attention"
    )


def _lacking_compiler(device: torch.device) -> str:
    """What this machine lacks for the compiler's backend of this device; empty if nothing."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton  # late, as below: it imports the compiler

        return "" if has_triton() else "Triton is not there, or finds no GPU"
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "there is no C++ compiler (environment variable CXX)"
    return ""


def compile_decoder(autoencoder: nn.Module, settings: Compile, device: torch.device) -> str:
    """Set an autoencoder's decoder to be compiled at its first call, if `compile.decoder` is set; returns what was
    done, in words. Each number of images at once compiles again, and with tiling each size of tile.
    """
    if not settings.decoder:
        return "no: compile.decoder is false"
    if not compiles(settings, device, ""):
        return _not_enabled(settings)
    decoder = autoencoder.get_submodule("decoder")
    decoder.compile(fullgraph=True, dynamic=False, mode=prepare(settings))
    return f"{type(decoder).__name__}, mode {settings.mode}"


def what_compiles(*said: str) -> str:
    """The part of `compile_`'s and `compile_decoder`'s words about compiled code; empty if all is eager."""
    return "; ".join(words for words in said if not words.startswith("no: "))


def cache_folder(configured: str) -> Path:
    """Folder of compiled code kept between runs: `configured`, else ``solrl_ray`` in the user's cache folder."""
    if configured:
        return located(configured, "compile.cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "solrl_ray" / "compiled"


def _not_enabled(settings: Compile) -> str:
    return f"no: compile.enabled is {'false' if settings.enabled is False else 'not true, and this is no GPU'}"


def prepare(settings: Compile) -> str | None:
    """Set the compiler up for the attention kernels that are in use; returns the mode as `torch.compile` takes it."""
    _use_cache(settings.cache)
    own = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    torch.compiler.config.cache_key_tag = f"{own}{attention.kernels()}-attention"
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = VARIANTS
    return None if settings.mode == "default" else settings.mode


def _use_cache(configured: str) -> None:
    folder = cache_folder(configured)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"compile.cache: the folder {folder} cannot be made: {error.strerror}") from error
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        if _is_pytorchs_own(os.environ.get(variable, "")):
            os.environ[variable] = str(folder / name)


def _is_pytorchs_own(folder: str) -> bool:
    """Whether the user did not choose a cache folder: it is empty, or PyTorch's own in the system's temporary folder.
    PyTorch writes the latter into the environment, for example when a model library is imported.
    """
    default = Path(tempfile.gettempdir()).absolute()
    return not folder or any(
        part.parent == default and part.name.startswith("torchinductor_")
        for part in (Path(folder).absolute(), *Path(folder).absolute().parents)
    )
