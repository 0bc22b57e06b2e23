"""How a revision is made: factors merged into the base once, quantised once, with what receivers must end
with."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from solrl_ray.config.schema import Lora, Model
from solrl_ray.errors import RunError
from solrl_ray.policy.merge import merged_weight
from solrl_ray.quantization.formats import FORMAT_OF_TIER, Format, frozen_amax, pack
from solrl_ray.quantization.scope import plan
from solrl_ray.revisions.payload import (
    Expected,
    Policy,
    Revision,
    packed_buffers,
    tensors_digest,
    touched_modules,
)

EXPLORER = "explorer"
REGENERATOR = "regenerator"


class Publisher:
    """Builds the revisions of one run from one base.

    What explorers hold of a quantised module is their format of bfloat16 of (bfloat16 base + alpha/rank · B A), with
    one rounding each; everything else that a receiver holds is the base's own dtype of (base + alpha/rank · B
    A). Sums are float64 in a fixed order (`policy.merge`), so neither device nor thread count changes a bit.
    """

    def __init__(self, base: Mapping[str, torch.Tensor], lora: Lora, *, quantized: Mapping[str, Format]) -> None:
        """Takes the base weights [out, in] of the modules that LoRA touches and the formats of those that
        explorers quantise.

        Raises:
            ValueError: a base weight with NaN or Inf.
        """
        self._base = dict(base)
        self._lora = lora
        self._quantized = dict(quantized)
        self._frozen_amax = {module: frozen_amax(base[module]) for module in sorted(quantized)}
        self._base_digest = tensors_digest(self._base)

    @classmethod
    def for_model(cls, transformer: nn.Module, config: Model, tier: str) -> Publisher:
        """For a transformer with or without adapters, whose explorers run `tier`."""
        linears = touched_linears(transformer, config.lora.targets)
        tiers = plan(linears, tier, config.quantization).tiers
        quantized = {module: FORMAT_OF_TIER[tiers[module]] for module in tiers}
        base = {module: linear.weight.detach() for module, linear in linears.items()}
        return cls(base, config.lora, quantized=quantized)

    @torch.no_grad()
    def build(self, revision: int, factors: Mapping[str, torch.Tensor], *, policy: Policy = "old") -> Revision:
        """A revision of `policy` after `revision` updates, from its float32 factors.

        Only the sampling policy (``old``) is packed: no explorer takes another one.

        Raises:
            RunError: a factor or merged weight with NaN or Inf, naming it, or factors of other modules than
            the base's.
        """
        self._check(factors)
        packed: dict[str, dict[str, torch.Tensor]] = {}
        bumped: list[str] = []
        merged: dict[str, torch.Tensor] = {}
        explored: dict[str, torch.Tensor] = {}
        for module in touched_modules(factors):
            weight = merge_module(module, self._base[module], factors, self._scaling)
            if not bool(torch.isfinite(weight).all()):
                raise RunError(f"the merged weight of {module} has NaN or Inf: revision {revision} is not published")
            merged[f"{module}.weight"] = weight
            if policy == "old" and module in self._quantized:
                packed[module], grown = self._pack(module, factors)
                bumped += [module] if grown else []
                explored.update(packed_buffers(module, packed[module]))
            else:
                explored[f"{module}.weight"] = weight
        modules = len(merged)
        expected = {REGENERATOR: Expected(modules=modules, digest=tensors_digest(merged))}
        if policy == "old":
            expected[EXPLORER] = Expected(modules=modules, digest=tensors_digest(explored))
        return Revision(
            revision=revision,
            parent=revision - 1 if revision else None,
            policy=policy,
            lora_rank=self._lora.rank,
            lora_alpha=self._lora.alpha,
            targets=tuple(self._lora.targets),
            base_digest=self._base_digest,
            factors={name: factor.detach().cpu().contiguous() for name, factor in sorted(factors.items())},
            packed=packed,
            bumped=tuple(bumped),
            expected=expected,
        )

    def _pack(self, module: str, factors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], bool]:
        """A module's merged weight in its format, on the CPU, and whether it outgrew its frozen amax."""
        format = self._quantized[module]
        rounded = merge_module(module, self._base[module].to(torch.bfloat16), factors, self._scaling)
        amax, grown = fitting_amax(self._frozen_amax[module], rounded) if format == "nvfp4" else (None, False)
        return {name: tensor.cpu() for name, tensor in pack(format, rounded, amax).items()}, grown

    @property
    def _scaling(self) -> float:
        return self._lora.alpha / self._lora.rank

    def _check(self, factors: Mapping[str, torch.Tensor]) -> None:
        names = {f"{module}.{factor}" for module in self._base for factor in ("lora_A", "lora_B")}
        if not names or names != set(factors):
            wrong = sorted(names ^ set(factors))
            raise RunError(f"the factors are not those of the {len(self._base)} touched modules: {wrong[:3]}")
        for name, factor in sorted(factors.items()):
            if not bool(torch.isfinite(factor).all()):
                raise RunError(f"factor {name} has NaN or Inf: the revision is not published")


def merge_module(module: str, base: torch.Tensor, factors: Mapping[str, torch.Tensor], scaling: float) -> torch.Tensor:
    """One module's merged weight, in the base's dtype and on its device."""
    return merged_weight(base, factors[f"{module}.lora_A"], factors[f"{module}.lora_B"], scaling)


def fitting_amax(frozen: float, weight: torch.Tensor) -> tuple[float, bool]:
    """The frozen amax, doubled until the weight fits, and whether that was needed.

    It depends on base and weight alone, not on what earlier revisions did, so a resumed run quantises alike.
    """
    largest = float(weight.float().abs().max())
    amax = frozen if frozen > 0 else largest
    while amax < largest:
        amax *= 2
    return amax, amax != frozen


def touched_linears(transformer: nn.Module, targets: Collection[str]) -> dict[str, nn.Linear]:
    """The linears that LoRA touches, by module path, whether or not adapters wrap them already.

    Raises:
        RunError: the targets match nothing.
    """
    found: dict[str, nn.Linear] = {}
    for name, module in transformer.named_modules():
        path = name.removesuffix(".base_layer")
        matches = any(path == target or path.endswith(f".{target}") for target in targets)
        if matches and isinstance(module, nn.Linear):
            found[path] = module
    if not found:
        raise RunError(f"model.lora.targets {sorted(targets)} match no linear of the transformer")
    return found
