"""One copy of a model, shared by all roles on a GPU: merged, quantised, offloaded and restored before each call.

::

    base ─┬─ regenerator   the same tensors; a policy is merged in place
          ├─ learner       the same tensors, with adapters; needs the weights as loaded
          └─ explorer      the same tensors, except for its private quantised and merged layers

Each role has its own module tree over these tensors. `bring_weights_for` must be called before a role computes. For a
learner, it restores the base from copies of the layers LoRA modifies, and frees the explorer's layers. When a sampler
runs again, merged and quantised weights are rebuilt from the last revision. All of this is exact: no bit of a result
depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from solrl_ray import models, rewards
from solrl_ray.common.progress_note import progress_note
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.errors import RunError
from solrl_ray.models import attention, compilation
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.components import Component
from solrl_ray.quantization.formats import Format, frozen_amax, pack
from solrl_ray.quantization.layers import QuantizedLinear, allocate_, free_
from solrl_ray.quantization.scope import QuantizationReport, quantize_, quantized_layers
from solrl_ray.rewards.base import Reward
from solrl_ray.weight_sync.checksums import Stamp, stamp, stamps
from solrl_ray.weight_sync.manifest import Policy
from solrl_ray.weight_sync.payload import Payload, Unusable
from solrl_ray.weight_sync.publish import touched_linears
from solrl_ray.weight_sync.receive import Receiver

Role = Literal["encoder", "explorer", "regenerator", "learner"]


class SharedModel:
    """The model, the rewards and the receivers of one process, for the roles that run in it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._model: DiffusionModel | None = None
        self._base: dict[str, Tensor] = {}
        """Path of each linear LoRA modifies → a copy of its weight as loaded."""
        self._reward: Reward | None = None
        self._merged: Receiver | None = None
        """The regenerator's receiver; its policy is merged into the base if `_is_merged`."""
        self._is_merged = False
        self._explored: _QuantizedCopy | None = None
        self._applied: Payload | None = None
        """The last revision applied to a role, with its factors on the device."""
        self.factors: Callable[[Policy], dict[str, Tensor]] | None = None
        """Returns the learner's factors of a policy; None without a learner."""
        self.free_text: Callable[[], None] | None = None
        """Frees the text encoders on this GPU; None without an encoder."""
        self._kernels = attention.kernels()
        self.kernels: dict[Role, str] = {}
        """Role → attention kernels (`attention.kernels`), if they differ from those that the process started with."""

    # At the start of a role

    def load(self, device: torch.device, components: Collection[Component]) -> DiffusionModel:
        """Load the missing components; returns the model with `components`. Its transformer is a separate module tree
        that shares all tensors.
        """
        config = self._config.model
        wanted: set[Component] = {
            "vae" if c == "preview_decoder" and not config.preview_decoder else c for c in components
        }
        missing = wanted - (self._model.components if self._model else frozenset())
        if missing:
            if self.free_text is not None:
                self.free_text()  # an encoder may have started earlier and not have encoded yet
            loaded = models.load(config, device, components=missing)
            self._model = self._model.joined(loaded) if self._model else loaded
            if "transformer" in missing:
                linears = touched_linears(loaded.transformer, config.lora.targets)
                self._base = {path: linear.weight.detach().clone() for path, linear in linears.items()}
        assert self._model is not None
        self._restore()  # a role starts with the base weights as loaded
        return self._model.view(wanted)

    def reward(self, device: torch.device) -> Reward:
        """The rewards of the configuration, loaded once."""
        if self._reward is None:
            self._reward = rewards.load(self._config.rewards, device)
        return self._reward

    def merged(self, transformer: nn.Module) -> Receiver:
        """Make the receiver for a regenerator's transformer, which `load` returned."""
        self._merged = Receiver(transformer, base=self._base)
        return self._merged

    def quantized(self, transformer: nn.Module, config: Config) -> tuple[QuantizationReport, Receiver]:
        """Quantise an explorer's transformer, which `load` returned, to its tier.

        Returns which layers were quantised, and the transformer's receiver.
        """
        tier = pool_sampling(config).tier
        assert self._model is not None
        frozen = _FrozenWeights(self._model.transformer, offload=bool(config.fleet.offload))

        def keep(path: str, layer: QuantizedLinear) -> None:
            if path not in self._base:
                frozen.add(path, layer.format)

        with progress_note(f"quantising the transformer to {tier}"):
            report = quantize_(transformer, tier, config.model.quantization, after=keep)
        layers = quantized_layers(transformer)
        for path, linear in touched_linears(transformer, config.model.lora.targets, missing_ok=True).items():
            linear.weight = nn.Parameter(self._base[path].clone(), requires_grad=False)
        bases = {path: self._base[path].to(torch.bfloat16) for path in self._base if path in layers}
        receiver = Receiver(transformer, base=self._base, quantized_base=bases)
        self._explored = _QuantizedCopy(receiver, layers, frozen, bases)
        return report, receiver

    def leave(self, role: Role) -> None:
        """Release the state of a role that has ended."""
        if role == "explorer" and self._explored is not None:
            self._explored.free()  # also brings offloaded weights back to the device
            self._explored = None
        elif role == "regenerator":
            self._restore()
            self._merged = None

    # While roles run

    def bring_weights_for(self, role: Role) -> None:
        """Put the weights that `role` computes with in place, and select its attention kernels."""
        if role == "explorer" and self._explored is not None:
            self._explored.make()
        elif role == "encoder" and self._explored is not None and self._explored.frozen.offload:
            self._explored.unload()
        elif self._explored is not None and (role in ("encoder", "learner") or self._explored.frozen.offload):
            self._explored.free()
        if role == "regenerator" and self._merged is not None and not self._is_merged:
            self._merged.reapply()
            self._is_merged = True
        if role == "learner":
            self._restore()
        kernels = self.kernels.get(role, self._kernels)
        if attention.kernels() != kernels:
            attention.use(kernels)
            compilation.prepare(self._config.compile)

    def prepare(self) -> None:
        """Rebuild the explorer's quantised layers that do not depend on the next revision."""
        if self._explored is not None and not self._explored.frozen.offload:
            self._explored.make(touched=False)

    def apply(self, receiver: Receiver, payload: Payload) -> tuple[int, str]:
        """`Receiver.apply` for the receiver of one role. A payload without factors takes those of this GPU's learner.

        Raises Unusable if the learner has no factors of that revision, and RunError as `Receiver.apply` does.
        """
        if self._applied is None or self._applied.manifest != payload.manifest:
            self._applied = self._on_device(payload)
        payload = self._applied
        if receiver is self._merged:
            self._is_merged = True
            return receiver.apply(payload)
        assert self._explored is not None
        self._explored.make(touched=False)
        applied = receiver.apply(payload)
        self._explored.complete = True
        return applied

    def _on_device(self, payload: Payload) -> Payload:
        """The payload with one copy of its factors on the device, which all roles share."""
        manifest, factors = payload.manifest, payload.tensors
        if not factors:
            factors = {} if self.factors is None else self.factors(manifest.policy)
            if not factors or any(manifest.tensors.get(name) != found for name, found in stamps(factors).items()):
                raise Unusable(
                    f"{manifest.name} came without its factors, and the learner on this GPU does not hold them either"
                )
        device = next(iter(self._base.values())).device
        return replace(payload, tensors={name: factor.to(device, copy=True) for name, factor in factors.items()})

    @torch.no_grad()
    def _restore(self) -> None:
        """Undo the merge: write the base weights back if a policy is merged into them."""
        if not self._is_merged:
            return
        assert self._model is not None
        for path, weight in self._base.items():
            layer = self._model.transformer.get_submodule(path)
            assert isinstance(layer, nn.Linear)
            layer.weight.copy_(weight)
        self._is_merged = False


class _QuantizedCopy:
    """An explorer's private layers: allocated while it runs, rebuilt from the base and the last revision."""

    def __init__(
        self, receiver: Receiver, layers: dict[str, QuantizedLinear], frozen: _FrozenWeights, touched: dict[str, Tensor]
    ) -> None:
        """
        Args:
            frozen: full-precision weights of the quantised layers that LoRA does not modify.
            touched: path → base weight, bfloat16, of each quantised layer that LoRA modifies.
        """
        self.frozen = frozen
        self._receiver, self._layers, self._touched = receiver, layers, touched
        self._amax = {path: _frozen_amax(weight, layers[path].format) for path, weight in touched.items()}
        self._allocated = self.complete = True
        """Whether the layers are in memory; `complete`: also those that LoRA modifies."""

    @torch.no_grad()
    def make(self, *, touched: bool = True) -> None:
        """Rebuild the layers; without `touched`, those LoRA modifies are left for the next revision to write."""
        if not self._allocated:
            self._allocated, self.complete = True, False
            for path, weight in self.frozen.weights.items():
                self.frozen.to_device([path])
                self._load(path, weight, self.frozen.amax[path])
                if self.frozen.offload:
                    self.frozen.to_host(path)
        if touched and not self.complete:
            self.complete = True
            if not self._receiver.reapply():
                for path, weight in self._touched.items():
                    self._load(path, weight, self._amax[path])

    def _load(self, path: str, weight: Tensor, amax: float | None) -> None:
        layer = self._layers[path]
        layer.load(pack(layer.format, weight, amax, finite=True))

    def free(self) -> None:
        """Free the layers and bring offloaded weights back to the device."""
        self._free_layers()
        self.frozen.to_device(self.frozen.weights)

    def unload(self) -> None:
        """Free the layers and move offloaded weights to the host."""
        self._free_layers()
        for path in self.frozen.weights:
            self.frozen.to_host(path)

    def _free_layers(self) -> None:
        if self._allocated:
            for layer in self._layers.values():
                layer.free()
            self._allocated = False


class _FrozenWeights:
    """Full-precision weights that LoRA does not modify. They can be offloaded: each has one host copy, made once."""

    def __init__(self, transformer: nn.Module, *, offload: bool) -> None:
        """`offload`: whether the weights move to the host while their quantised layers are in memory."""
        self.offload = offload
        self.weights: dict[str, Tensor] = {}
        self.amax: dict[str, float | None] = {}
        self._transformer = transformer
        self._host: dict[str, tuple[Tensor, Stamp]] = {}

    def add(self, path: str, stored: Format) -> None:
        """Add the weight of a linear that was just quantised. With `offload` it leaves at once: a small GPU cannot hold
        all weights in both precisions.
        """
        linear = self._transformer.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        self.weights[path] = linear.weight
        self.amax[path] = _frozen_amax(linear.weight, stored)
        if self.offload:
            self.to_host(path)

    def to_host(self, path: str) -> None:
        weight = self.weights[path]
        if _is_away(weight):
            return
        if path not in self._host:
            host = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.is_cuda)
            self._host[path] = host.copy_(weight), stamp(weight)
        free_(weight)

    @torch.no_grad()
    def to_device(self, paths: Iterable[str]) -> None:
        away = [path for path in paths if _is_away(self.weights[path])]
        for path in away:
            allocate_(self.weights[path])
            self.weights[path].copy_(self._host[path][0], non_blocking=True)
        for path in away:
            if stamp(self.weights[path]) != self._host[path][1]:
                raise RunError(f"the weight of {path} came back to the device altered; its memory is faulty")


def _frozen_amax(weight: Tensor, stored: Format) -> float | None:
    return frozen_amax(weight) if stored == "nvfp4" else None


def _is_away(weight: Tensor) -> bool:
    return weight.untyped_storage().nbytes() == 0
