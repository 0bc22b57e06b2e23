"""Applies a revision in a worker: verifies the payload, writes all weights in place, and reads them back.

::

    payload ─► verify ─┬─► packed weights ────────────────────┬─► write ─► checksums of the buffers ─► receipt
                       └─► factors, merged into the worker's ─┘
                           base, then quantised
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.errors import RunError
from solrl_ray.quantization.formats import pack
from solrl_ray.quantization.layers import QuantizedLinear
from solrl_ray.quantization.planning import plan
from solrl_ray.weight_sync.checksums import Stamp, Stamps, stamps_digest, tensors_digest
from solrl_ray.weight_sync.manifest import Manifest, is_factor, module_of
from solrl_ray.weight_sync.payload import Payload
from solrl_ray.weight_sync.publish import merge_module, touched_linears

Layer = nn.Linear | QuantizedLinear
Tensors = dict[str, torch.Tensor]


class Receiver:
    """Receives revisions for one model; keeps base weights of the layers that it merges itself.

    The model is a plain transformer with its base weights, quantised or not. Revisions are written in place, so that
    compiled code over them stays valid.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        base: Mapping[str, torch.Tensor] | None = None,
        quantized_base: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """
        Args:
            base: module path → weight of every layer LoRA modifies; these never change. If None, the receiver copies
                the weights of those layers that are not quantised.
            quantized_base: module path → bfloat16 weight, before quantisation, of layers that LoRA modifies and this
                model quantises (`bases_to_keep`). Needed to apply a revision that has only factors.
        """
        self._model = model
        self._given = base
        self._quantized_base = dict(quantized_base or {})
        self._base: Tensors | None = None
        self._base_digest = ""
        self._held: Payload | None = None
        """The last revision applied."""
        self._layers: dict[str, Layer] = {}
        """Module path → layer that LoRA modifies."""

    def reapply(self) -> bool:
        """Write the last revision again, into weights that were freed or restored; returns False if there is none.

        A revision is kept for this only if the receiver was given `base`.
        """
        if self._held is not None:
            self._write(self._held)
        return self._held is not None

    def apply(self, payload: Payload) -> tuple[int, str]:
        """Applies a revision; returns the number of overwritten modules and `tensors_digest` of their new content.

        Raises RunError: the revision has no modules, the model lacks one or holds it in another format, the base
        weights differ, or weights quantised here differ from the published ones.
        """
        manifest = payload.manifest
        if not manifest.modules:
            raise RunError(f"{manifest.name} modifies no module, so there are no weights to apply")
        held = self._write(payload)
        if self._given is not None:  # other roles may need the shared weights without the revision in between
            self._held = payload
        return len(manifest.modules), stamps_digest(held)

    def _write(self, payload: Payload) -> dict[str, Stamp]:
        """Write a revision into the layers; returns tensor name in the revision → stamp of the layer's new content."""
        manifest = payload.manifest
        if self._layers.keys() != set(manifest.modules):
            self._layers = {module: touched_layer(self._model, module) for module in manifest.modules}
        self._remember_base(manifest)
        self._check_mergeable(payload)
        sent = self._sent(payload)
        held = Stamps()
        for module, layer in self._layers.items():
            held.add(self._overwrite(payload, module, layer, sent.get(module)))
        content = held.result()
        for name, found in content.items():
            quantized_here = isinstance(self._layers[module_of(name)], QuantizedLinear) and module_of(name) not in sent
            if quantized_here and manifest.tensors.get(name) != found:
                raise RunError(
                    f"{name} of {manifest.name} differs here from the published one: "
                    "this worker merged or quantised the factors differently"
                )
        return content

    def _remember_base(self, manifest: Manifest) -> None:
        """Keep the weights of the unquantised layers that LoRA modifies, before the first revision is applied.

        Raises RunError if the revision was built for other base weights.
        """
        if self._base is None:
            linears = {m: layer for m, layer in self._layers.items() if isinstance(layer, nn.Linear)}
            self._base = {m: self._given[m] if self._given else x.weight.detach().clone() for m, x in linears.items()}
            if len(linears) == len(self._layers):  # a worker that quantises some layers does not hold the whole base
                self._base_digest = tensors_digest({f"{m}.weight": weight for m, weight in self._base.items()})
        if self._base_digest not in ("", manifest.base_digest):
            raise RunError(
                f"{manifest.name} was built for other base weights than this worker's: "
                "use the same checkpoint files (model.path) on all nodes"
            )

    def _check_mergeable(self, payload: Payload) -> None:
        """Raises RunError unless each unquantised layer has factors and a base to merge them into."""
        for module in (m for m, layer in self._layers.items() if isinstance(layer, nn.Linear)):
            if f"{module}.lora_A" not in payload.tensors:
                raise RunError(f"{payload.manifest.name} packs {module}, which this worker holds unquantised")
            if self._base is None or module not in self._base:
                raise RunError(f"{payload.manifest.name} modifies {module}, whose base weight this worker did not keep")

    def _sent(self, payload: Payload) -> dict[str, Tensors]:
        """Module path → packed weight in the payload, for this worker's quantised layers.

        Raises RunError if a layer has neither a packed weight nor factors to make one from.
        """
        quantized = {m for m, layer in self._layers.items() if isinstance(layer, QuantizedLinear)}
        sent: dict[str, Tensors] = {}
        for name, tensor in payload.tensors.items():
            if not is_factor(name) and module_of(name) in quantized:
                sent.setdefault(module_of(name), {})[name.rsplit(".", 1)[1]] = tensor
        for module in quantized - sent.keys():
            self._check_quantizable(payload, module)
        return sent

    @torch.no_grad()
    def _overwrite(self, payload: Payload, module: str, layer: Layer, sent: Tensors | None) -> Tensors:
        """Write a layer's new weight into its buffers; returns tensor name in a revision → buffer."""
        manifest, factors = payload.manifest, payload.tensors
        try:
            if isinstance(layer, nn.Linear):
                assert self._base is not None
                layer.weight.copy_(merge_module(self._base[module], module, factors, manifest.lora.scaling))
                return {f"{module}.weight": layer.weight}
            if sent is None:
                merged = merge_module(self._quantized_base[module], module, factors, manifest.lora.scaling)
                sent = pack(layer.format, merged, manifest.amax.get(module), finite=True)
            layer.load(sent)
        except ValueError as error:
            raise RunError(f"{manifest.name} does not fit {module}: {error}") from error
        return {f"{module}.{name}": tensor for name, tensor in layer.tensors().items()}

    def _check_quantizable(self, payload: Payload, module: str) -> None:
        """Raises RunError unless the module's packed weight can be made from factors."""
        manifest = payload.manifest
        if module not in manifest.formats:
            raise RunError(f"{manifest.name} does not pack {module}, which this worker holds quantised")
        if module not in self._quantized_base or f"{module}.lora_A" not in payload.tensors:
            raise RunError(
                f"{manifest.name} came without the packed weight of {module}, "
                "whose base weight this worker did not keep"
            )


def bases_to_keep(model: nn.Module, config: Config, device: torch.device) -> Tensors:
    """Module path → bfloat16 copy of each weight that LoRA modifies and an explorer will quantise.

    An explorer that is sent only factors must make these copies before `quantize_`. Empty if it is sent packed weights.
    """
    if config.publish.mode != "lora":
        return {}
    linears = touched_linears(model, config.model.lora.targets)
    quantized = plan(linears, pool_sampling(config).tier, config.model.quantization).quantized
    return {path: linears[path].weight.detach().to(device, torch.bfloat16, copy=True) for path in quantized}


def touched_layer(model: nn.Module, module: str) -> Layer:
    """The layer at the path of a module LoRA modifies. Raises `RunError` if the model has no linear at that path."""
    try:
        layer = model.get_submodule(module)
    except AttributeError as error:
        raise RunError(f"the revision modifies {module}, which this worker's model lacks") from error
    if not isinstance(layer, nn.Linear | QuantizedLinear):
        raise RunError(f"the revision modifies {module}, which is no linear but a {type(layer).__name__}")
    return layer
