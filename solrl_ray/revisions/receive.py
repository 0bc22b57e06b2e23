"""How a worker takes a revision: every touched buffer overwritten in place, then read back and digested."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from solrl_ray.errors import RunError
from solrl_ray.quantization.layers import QuantizedLinear
from solrl_ray.revisions.payload import Revision, packed_buffers, tensors_digest
from solrl_ray.revisions.publish import merge_module


class Receiver:
    """A model's side of publishing: remembers the base of what it merges itself.

    The model is a plain transformer with its base weights, quantised or not. Buffers keep their addresses, so
    that compiled graphs over them stay valid.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._base: dict[str, torch.Tensor] | None = None

    def apply(self, revision: Revision) -> tuple[int, str]:
        """Takes a revision; returns how many modules were overwritten and `tensors_digest` of what they hold
        now.

        Raises:
            RunError: nothing to overwrite, a module that the model lacks or holds otherwise, another base.
        """
        if self._base is None:
            self._base = base_copies(self._model, revision)
        if any(isinstance(self._model.get_submodule(module), QuantizedLinear) for module in revision.modules):
            return apply_packed(self._model, revision, self._base)
        return apply_merged(self._model, revision, self._base)


def base_copies(model: nn.Module, revision: Revision) -> dict[str, torch.Tensor]:
    """Copies of the weights of touched, unquantised modules; taken before any revision is applied."""
    layers = {module: touched_layer(model, module) for module in revision.modules}
    return {module: layer.weight.detach().clone() for module, layer in layers.items() if isinstance(layer, nn.Linear)}


@torch.no_grad()
def apply_packed(model: nn.Module, revision: Revision, base_weights: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Takes a revision into a quantised model: packed bytes, or merged weights where a touched layer is not
    quantised.

    `base_weights` are needed for the latter only. Returns and raises as `Receiver.apply`.
    """
    _check_touches(revision)
    held: dict[str, torch.Tensor] = {}
    for module in revision.modules:
        layer = touched_layer(model, module)
        if isinstance(layer, nn.Linear):
            if module in revision.packed:
                raise RunError(f"{revision.name} packs {module}, which this worker holds unquantised")
            held[f"{module}.weight"] = _merge_into(layer, module, revision, base_weights)
            continue
        if module not in revision.packed:
            raise RunError(f"{revision.name} does not pack {module}, which this worker holds quantised")
        try:
            layer.load(revision.packed[module])
        except ValueError as error:
            raise RunError(f"{revision.name} does not fit {module}: {error}") from error
        held.update(packed_buffers(module, layer.tensors()))
    return len(revision.modules), tensors_digest(held)


@torch.no_grad()
def apply_merged(model: nn.Module, revision: Revision, base_weights: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Takes a revision into a full-precision model: factors merged in float64, rounded once to the weight's
    dtype.

    Returns and raises as `Receiver.apply`.
    """
    _check_touches(revision)
    if tensors_digest(base_weights) != revision.base_digest:
        raise RunError(f"{revision.name} was made for other base weights than this worker's")
    held: dict[str, torch.Tensor] = {}
    for module in revision.modules:
        layer = touched_layer(model, module)
        if not isinstance(layer, nn.Linear):
            raise RunError(f"{module} is quantised, but only full-precision weights can be merged into")
        held[f"{module}.weight"] = _merge_into(layer, module, revision, base_weights)
    return len(revision.modules), tensors_digest(held)


def touched_layer(model: nn.Module, module: str) -> nn.Linear | QuantizedLinear:
    """The layer at a touched module's path. Raises `RunError` if the model has no linear there."""
    try:
        layer = model.get_submodule(module)
    except AttributeError as error:
        raise RunError(f"the revision touches {module}, which this worker's model lacks") from error
    if not isinstance(layer, nn.Linear | QuantizedLinear):
        raise RunError(f"the revision touches {module}, which is a {type(layer).__name__} here")
    return layer


def _merge_into(
    layer: nn.Linear, module: str, revision: Revision, base_weights: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    if module not in base_weights:
        raise RunError(f"{revision.name} touches {module}, whose base this worker did not keep")
    layer.weight.copy_(merge_module(module, base_weights[module], revision.factors, revision.scaling))
    return layer.weight


def _check_touches(revision: Revision) -> None:
    if not revision.modules:
        raise RunError(f"{revision.name} touches no module: nothing would be published")
