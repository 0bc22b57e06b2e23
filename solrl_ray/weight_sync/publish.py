"""Builds revisions: merges factors into the base once, quantises once, and computes the checksums for receivers.

Each learner rank builds the shard of its modules, and the shards are combined:

    rank 0   shard(modules 0, 2, 4, …) ─┐
    rank 1   shard(modules 1, 3, 5, …) ─┴─► assemble ─► Revision      the same bytes for any number of ranks
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from solrl_ray.common.finite import Extremes, first_not_finite
from solrl_ray.common.module_paths import ends_in
from solrl_ray.common.tensor_serialization import Portable, to_host
from solrl_ray.config.schema import Config, Lora
from solrl_ray.errors import RunError
from solrl_ray.policy.merge import merged_weight
from solrl_ray.quantization.formats import frozen_amax, pack
from solrl_ray.quantization.planning import FORMAT_OF_TIER, Format, plan
from solrl_ray.weight_sync.checksums import Stamp, Stamps, stamp, stamps, stamps_digest
from solrl_ray.weight_sync.manifest import Expected, Manifest, Policy, module_of
from solrl_ray.weight_sync.payload import Revision
from solrl_ray.weight_sync.publication import EXPLORER, REGENERATOR

FACTORS = ("lora_A", "lora_B")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RevisionShard(Portable, read_only=True):
    """One rank's share of a revision: some of the modules LoRA modifies."""

    revision: int
    policy: Policy
    base: dict[str, Stamp]
    """Stamps of the base weights, by name ``<module>.weight``."""
    formats: dict[str, str]
    """`formats`, `amax` and `bumped`: the fields of `Manifest`, for these modules."""
    amax: dict[str, float]
    bumped: tuple[str, ...]
    packed: dict[str, torch.Tensor]
    """Quantised weights on the CPU; empty if no explorer needs them."""
    stamps: dict[str, Stamp]
    """Stamps of the factors and of all quantised weights, computed on the tensors' device."""
    held: dict[str, dict[str, Stamp]]
    """Role → stamps of the weights its workers hold for these modules afterwards."""


class Publisher:
    """Builds the revisions of one run from one base.

    A quantised module of an explorer is computed in two roundings: bfloat16(bfloat16 base + alpha/rank · B A), then its
    format. All other weights of receivers are base + alpha/rank · B A, rounded once to the base's dtype. Sums are
    float64 in a fixed order (`policy.merge`), so neither the device nor the number of threads changes a bit.
    """

    def __init__(self, base: Mapping[str, torch.Tensor], lora: Lora, *, formats: Mapping[str, Format]) -> None:
        """
        Args:
            base: module path → base weight [out, in] of each module LoRA modifies.
            formats: module path → format of each of these modules that explorers quantise.

        Raises ValueError if a base weight has NaN or Inf.
        """
        self._base = {module: base[module] for module in sorted(base)}
        self._lora = lora
        self._formats = dict(formats)
        self._frozen_amax = {m: frozen_amax(base[m]) for m in sorted(formats) if formats[m] == "nvfp4"}
        self._base_stamps: dict[str, Stamp] = {}

    @classmethod
    def for_model(cls, transformer: nn.Module, config: Config, *, tier: str) -> Publisher:
        """The publisher for a transformer, with or without adapters, and explorers that run `tier`."""
        linears = touched_linears(transformer, config.model.lora.targets)
        quantized = plan(linears, tier, config.model.quantization).quantized
        return cls(
            {module: linear.weight.detach() for module, linear in linears.items()},
            config.model.lora,
            formats={module: FORMAT_OF_TIER[tier] for module in quantized},
        )

    def build(self, revision: int, factors: Mapping[str, torch.Tensor], *, policy: Policy = "old") -> Revision:
        """A whole revision, built by one rank; see `shard`."""
        return assemble([self.shard(revision, factors, policy=policy)], self._lora, to_host(factors))

    @torch.no_grad()
    def shard(
        self,
        revision: int,
        factors: Mapping[str, torch.Tensor],
        *,
        policy: Policy = "old",
        rank: int = 0,
        world_size: int = 1,
        pack: bool = True,
        buffers: dict[str, torch.Tensor] | None = None,
    ) -> RevisionShard:
        """The share of `rank` in a revision of `policy` after `revision` updates, from float32 factors.

        Only the sampling policy (``old``) is packed, because explorers run no other policy.

        Args:
            factors: all factors of the policy, on any device.
            pack: whether any explorer needs packed weights, because it does not quantise them itself.
            buffers: name → host memory for weights that were packed on a GPU. The next call reuses it, so this shard is
                valid only until then. Fresh memory takes several times as long.

        Raises:
            RunError: a factor or merged weight (named in the message) has NaN or Inf, or the factors are of other
                modules than the base.
        """
        self._check(factors)
        modules = list(self._base)[rank::world_size]
        merged, quantized, extremes = Stamps(), Stamps(), Extremes()
        packed: dict[str, torch.Tensor] = {}
        amax: dict[str, float] = {}
        bumped: list[str] = []
        for module in modules:
            weight = merge_module(self._base[module], module, factors, self._lora.scaling)
            extremes.add(module, weight)
            merged.add({f"{module}.weight": weight})
            if policy != "old" or module not in self._formats:
                continue
            try:
                tensors, fitting = self._pack(module, weight, factors)
            except ValueError:
                _check_finite(extremes, revision)
                raise
            if pack:
                packed |= {name: _on_host(name, tensor, buffers) for name, tensor in tensors.items()}
            quantized.add(tensors)
            if fitting is not None:
                amax[module] = fitting
                bumped += [module] if fitting != self._frozen_amax[module] else []
        _check_finite(extremes, revision)
        self._base_stamps |= {m: stamp(self._base[m]) for m in modules if m not in self._base_stamps}
        factor_stamps = stamps({f"{m}.{factor}": factors[f"{m}.{factor}"] for m in modules for factor in FACTORS})
        quantized_stamps = quantized.result()
        held = {REGENERATOR: merged.result()}
        if policy == "old":
            unquantized = {n: found for n, found in held[REGENERATOR].items() if module_of(n) not in self._formats}
            held[EXPLORER] = unquantized | quantized_stamps
        return RevisionShard(
            revision=revision,
            policy=policy,
            base={f"{module}.weight": self._base_stamps[module] for module in modules},
            formats={m: self._formats[m] for m in modules if policy == "old" and m in self._formats},
            amax=amax,
            bumped=tuple(bumped),
            packed=packed,
            stamps=quantized_stamps | factor_stamps,
            held=held,
        )

    def _pack(
        self, module: str, merged: torch.Tensor, factors: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], float | None]:
        """A module's merged weight in its format, and its amax if the format has one."""
        rounded = merged
        if merged.dtype != torch.bfloat16:  # rounded once: from the bfloat16 base, not from the merged weight
            rounded = merge_module(self._base[module].to(torch.bfloat16), module, factors, self._lora.scaling)
        format, amax = self._formats[module], None
        if format == "nvfp4":
            amax = fitting_amax(self._frozen_amax[module], rounded)
        return {f"{module}.{n}": t for n, t in pack(format, rounded, amax, finite=rounded is merged).items()}, amax

    def _check(self, factors: Mapping[str, torch.Tensor]) -> None:
        names = {f"{module}.{factor}" for module in self._base for factor in FACTORS}
        if not names or names != set(factors):
            wrong = sorted(names ^ set(factors))
            raise RunError(
                f"the factors are not those of the {len(self._base)} modules that LoRA modifies; missing or unknown: "
                f"{wrong[:3]}"
            )
        if name := first_not_finite(factors):
            raise RunError(f"factor {name} has NaN or Inf: the revision is not published")


def _check_finite(merged: Extremes, revision: int) -> None:
    if module := merged.first_not_finite():
        raise RunError(f"the merged weight of {module} has NaN or Inf: revision {revision} is not published")


def _on_host(name: str, tensor: torch.Tensor, buffers: dict[str, torch.Tensor] | None) -> torch.Tensor:
    """The tensor on the CPU. A GPU tensor is copied into the buffer of that name, which is created if it is missing or
    has another shape or dtype.
    """
    if not tensor.is_cuda or buffers is None:
        return tensor.cpu()
    held = buffers.get(name)
    if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
        held = buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
    return held.copy_(tensor)


def assemble(shards: Sequence[RevisionShard], lora: Lora, factors: Mapping[str, torch.Tensor]) -> Revision:
    """Combine the shards of all ranks into a revision; the same bytes for any number of ranks.

    `factors`: the factors that the shards were built from, on the CPU. Raises RunError if the shards are of different
    revisions.
    """
    named = {(shard.policy, shard.revision) for shard in shards}
    if len(named) != 1:
        raise RunError(f"the learner ranks must build shards of one revision, but they built {sorted(named)}")
    ((policy, revision),) = named

    def joined(field: str) -> dict[str, Any]:
        return {name: value for shard in shards for name, value in getattr(shard, field).items()}

    tensors = dict(sorted((dict(factors) | joined("packed")).items()))
    held = {role: {n: s for shard in shards for n, s in shard.held[role].items()} for role in sorted(shards[0].held)}
    modules = len({module_of(name) for name in factors})
    manifest = Manifest(
        revision=revision,
        policy=policy,
        lora=lora,
        base_digest=stamps_digest(joined("base")),
        formats=dict(sorted(joined("formats").items())),
        amax=dict(sorted(joined("amax").items())),
        bumped=tuple(sorted(m for shard in shards for m in shard.bumped)),
        expected={role: Expected(modules=modules, digest=stamps_digest(stamps)) for role, stamps in held.items()},
        tensors=dict(sorted(joined("stamps").items())),
    )
    return Revision(manifest=manifest, tensors=tensors)


def merge_module(base: torch.Tensor, module: str, factors: Mapping[str, torch.Tensor], scaling: float) -> torch.Tensor:
    """The merged weight of one module, in the base's dtype and on its device."""
    return merged_weight(base, factors[f"{module}.lora_A"], factors[f"{module}.lora_B"], scaling)


def fitting_amax(frozen: float, weight: torch.Tensor) -> float:
    """The frozen amax, doubled until the weight fits.

    It depends only on the base and the weight, not on earlier revisions, so a resumed run quantises identically.
    """
    largest = float(weight.float().abs().max())
    amax = frozen if frozen > 0 else largest
    while amax < largest:
        amax *= 2
    return amax


def touched_linears(
    transformer: nn.Module, targets: Collection[str], *, missing_ok: bool = False
) -> dict[str, nn.Linear]:
    """Module path → each linear LoRA modifies, with or without adapters around it.

    Raises RunError if the targets match no linear, unless `missing_ok` (for transformers whose targets are all
    quantised).
    """
    found: dict[str, nn.Linear] = {}
    for name, module in transformer.named_modules():
        path = name.removesuffix(".base_layer")
        if isinstance(module, nn.Linear) and ends_in(path, targets):
            found[path] = module
    if not found and not missing_ok:
        raise RunError(f"model.lora.targets {sorted(targets)} match no linear of the transformer")
    return found
