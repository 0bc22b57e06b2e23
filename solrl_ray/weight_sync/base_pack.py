"""The base pack: a whole transformer in the explorers' precision, for explorers that do not load the checkpoint.

Quantised layers are stored in their format, the rest as in the checkpoint. For FLUX.1-dev that is 11 GB instead of 24.
An explorer built from it equals, bit for bit, one that quantises the checkpoint itself.
``docs/reference/revision-format.md`` has the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.errors import RunError
from solrl_ray.quantization import capability
from solrl_ray.quantization.activations import ActivationQuantizer
from solrl_ray.quantization.formats import Format, frozen_amax, pack_by_rows
from solrl_ray.quantization.planning import FORMAT_OF_TIER, Plan, plan
from solrl_ray.quantization.scope import LAYERS, QuantizationReport
from solrl_ray.weight_sync import container
from solrl_ray.weight_sync.checksums import stamp, stamps_digest
from solrl_ray.weight_sync.container import Buffer, Unusable
from solrl_ray.weight_sync.manifest import LAYOUT, STAMPS, read_checked, write_checked

FORMAT = "solrl-base-1"
WHAT = "the base pack"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BasePack:
    digest: str
    """`tensors_digest` of all its tensors."""
    tiers: dict[str, str]
    """Path of each quantised layer → its tier."""
    tensors: dict[str, torch.Tensor]
    """``<layer>.<tensor>`` of quantised layers, parameters and buffers of the rest; views of the buffer read."""


@torch.no_grad()
def write(transformer: nn.Module, config: Config, *, threads: int = 1) -> bytes:
    """The pack of a transformer that is not quantised yet and has no adapters; does not change the transformer.

    Args:
        threads: layers that are quantised at a time.

    Raises:
        RunError: the explorers of this configuration quantise nothing.
    """
    linears = _linears(transformer)
    tiers = plan(linears, pool_sampling(config).tier, config.model.quantization).tiers
    if not tiers:
        raise RunError("the explorers quantise nothing, so there is no base pack to make")
    tensors = {name: value.detach().cpu() for name, value in _parameters_and_buffers(transformer).items()}
    with ThreadPoolExecutor(threads) as pool:
        packed = pool.map(lambda path: _packed(linears[path].weight, FORMAT_OF_TIER[tiers[path]]), tiers)
        for path, made in zip(tiers, packed, strict=True):
            del tensors[f"{path}.weight"]
            tensors |= {f"{path}.{name}": value.cpu() for name, value in made.items()}
    stamps = {name: stamp(value) for name, value in sorted(tensors.items())}
    body = {
        "format": FORMAT,
        "layout": LAYOUT,
        "identity": identity(config),
        "digest": stamps_digest(stamps),
        "tiers": tiers,
        "tensors": STAMPS.dump_python(stamps, mode="json"),
    }
    return container.write(tensors, {"manifest": write_checked(body)})


@torch.no_grad()  # which holds for the thread that enters it
def _packed(weight: torch.Tensor, format: Format) -> dict[str, torch.Tensor]:
    amax = frozen_amax(weight) if format == "nvfp4" else None
    return pack_by_rows(format, weight, amax)


def read(buffer: Buffer, config: Config) -> BasePack:
    """Reads a pack for the explorers of `config`, verifying every checksum.

    Raises:
        Unusable: it is damaged, of another format, or of another model or quantisation.
    """
    metadata, tensors = container.read(buffer, WHAT)
    body = read_checked(metadata.get("manifest", ""), f"the manifest of {WHAT}")
    if (body.get("format"), body.get("layout")) != (FORMAT, LAYOUT):
        raise Unusable(f"{WHAT} is in format {body.get('format')} {body.get('layout')}, not {FORMAT} {LAYOUT}")
    if body["identity"] != identity(config):
        raise Unusable(f"{WHAT} was made for another model, tier or scope than this run's")
    stamps = STAMPS.validate_python(body["tensors"])
    for name in sorted(stamps.keys() | tensors.keys()):
        if name not in tensors or stamps.get(name) != stamp(tensors[name]):
            raise Unusable(f"tensor {name!r} of {WHAT} does not have the checksum its manifest states")
    return BasePack(digest=body["digest"], tiers=body["tiers"], tensors=tensors)


def build(
    skeleton: nn.Module, base: BasePack, config: Config, device: torch.device, *, without_kernels: bool = False
) -> QuantizationReport:
    """Fills a transformer on the meta device (`DiffusionModel.skeleton`) from a pack, in place, on `device`.

    Reports and takes `without_kernels` as `quantize_` does.

    Raises:
        UserError: the device cannot run a tier of the pack.
        RunError: the skeleton has other layers, parameters or buffers than the pack.
    """
    linears = _linears(skeleton)
    tier = pool_sampling(config).tier
    skipped = plan(linears, tier, config.model.quantization).skipped
    if not without_kernels:
        capability.check(dict.fromkeys(base.tiers.values()), device)
    left = dict(base.tensors)
    quantizer = ActivationQuantizer()
    for path, own in base.tiers.items():
        if path not in linears:
            raise RunError(f"{WHAT} has a layer {path}, which the model lacks")
        linear, layer = linears[path], LAYERS[own]
        names = {name.rpartition(".")[2] for name in left if name.rpartition(".")[0] == path} - {"bias"}
        tensors = {name: left.pop(f"{path}.{name}").to(device) for name in sorted(names)}
        bias = left.pop(f"{path}.bias").to(device) if linear.bias is not None else None
        skeleton.set_submodule(path, layer(tensors, bias, linear.in_features, quantizer))
    _fill(skeleton, left, device)
    planned = Plan({path: base.tiers[path] for path in linears if path in base.tiers}, skipped)
    return QuantizationReport.of(tier, planned, linears)


def identity(config: Config) -> dict[str, Any]:
    """The part of the configuration that fixes the bytes of a pack."""
    model = config.model
    fields = model.model_dump(mode="json", include={"family", "path", "dtype"})
    return fields | {"tier": pool_sampling(config).tier, "scope": model.quantization.model_dump(mode="json")}


def _fill(skeleton: nn.Module, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Gives every parameter and buffer without memory its tensor."""
    hollow = {n for n, value in _parameters_and_buffers(skeleton).items() if value.is_meta}
    if hollow != tensors.keys():
        wrong = sorted(hollow ^ tensors.keys())
        raise RunError(f"{WHAT} and the model differ in {len(wrong)} parameters or buffers, first {wrong[0]}")
    for name, tensor in tensors.items():
        parent, _, leaf = name.rpartition(".")
        module = skeleton.get_submodule(parent)
        value = tensor.to(device, copy=True)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[leaf] = value
    for path, module in skeleton.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise RunError(f"{path}.{name} is no parameter or buffer, so that {WHAT} cannot hold it")


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}


def _parameters_and_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
