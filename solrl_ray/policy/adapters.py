"""The LoRA adapters of a transformer, as PEFT layers: attach, switch, decay.

======== ========================================================== =======
name     meaning                                                    trained
======== ========================================================== =======
default  the policy that the objective trains                       yes

old      the sampling policy; follows `default` by `decay_`         no

anchor   limits how far `default` moves; follows it by `decay_`;    no
         only with objectives that use it

base     no adapter: the reference of the KL term                   no
======== ========================================================== =======

Factors are float32 whatever the dtype of the base. PEFT casts a layer's input to the factors' dtype, and the sum back.
Names are ``<module>.lora_A`` [rank, in] and ``<module>.lora_B`` [out, rank], in sorted order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from solrl_ray.common.module_paths import ends_in
from solrl_ray.config.schema import Lora
from solrl_ray.errors import UserError
from solrl_ray.records import Address
from solrl_ray.sampling.noise import standard_normal

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer  # at run time imported late: it takes seconds, and only a learner needs it

Adapter = Literal["default", "old", "anchor"]
Active = Literal["default", "old", "anchor", "base"]
ADAPTERS: tuple[Adapter, ...] = ("default", "old")
TRAINED: Adapter = "default"

INITIALISATION = "lora-init"
"""Purpose of the addresses of the initial A factors; the module path replaces the prompt id."""


def attach(transformer: nn.Module, lora: Lora, run_seed: int, *, anchor: bool = False) -> None:
    """Freeze `transformer` and add ``default``, ``old`` and optionally ``anchor`` to it, with equal factors.

    A is gaussian with standard deviation 1 / rank, drawn from run seed and module path. B is zero, so the policy starts
    as the base model. ``default`` is active afterwards.

    Raises UserError: an entry of ``model.lora.targets`` names no linear layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    _check_targets(transformer, lora.targets)
    transformer.requires_grad_(False)
    names: tuple[Adapter, ...] = (*ADAPTERS, "anchor") if anchor else ADAPTERS
    for name in names:
        # `low_cpu_mem_usage` allocates nothing yet: PEFT would draw initial values from the global generator.
        config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets))  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
            inject_adapter_in_model(config, transformer, adapter_name=name, low_cpu_mem_usage=True)
    for path, layer in _layers(transformer):
        address = Address(run_seed=run_seed, purpose=INITIALISATION, prompt_id=path)
        base = layer.get_base_layer()
        assert isinstance(base, nn.Linear)
        first = torch.from_numpy(standard_normal(address, (lora.rank, base.in_features))) / lora.rank
        zero = torch.zeros(base.out_features, lora.rank)
        for name in names:
            layer.lora_A[name].weight = nn.Parameter(first.clone().to(base.weight.device))
            layer.lora_B[name].weight = nn.Parameter(zero.clone().to(base.weight.device))
    use(transformer, TRAINED)


def use(transformer: nn.Module, active: Active) -> None:
    """Activate one adapter for forwards of `transformer`, or none (``base``).

    Only the factors of ``default`` require gradients, whichever adapter is active. Gradient checkpointing recomputes
    forwards during the backward pass, so switch back before it.
    """
    _switch([layer for _, layer in _layers(transformer)], active)


def _switch(layers: list[LoraLayer], active: Active) -> None:
    for layer in layers:
        if layer.disable_adapters != (active == "base"):  # only if needed: both calls visit all factors
            layer.enable_adapters(active != "base")
        if active != "base" and layer.active_adapters != [active]:
            layer.set_adapter(active)
        # PEFT makes the active adapter trainable, and only that one.
        for factors in (layer.lora_A, layer.lora_B):
            for name, factor in factors.items():
                factor.weight.requires_grad_(name == TRAINED)


@contextmanager
def using(transformer: nn.Module, active: Active) -> Iterator[None]:
    """`use` for a ``with`` block; restores the previously active adapter at its end."""
    layers = [layer for _, layer in _layers(transformer)]  # once: finding the layers takes as long as switching them
    before = _active(layers)
    _switch(layers, active)
    try:
        yield
    finally:
        _switch(layers, before)


def active_adapter(transformer: nn.Module) -> Active:
    """The active adapter. Raises ValueError if layers disagree or no adapters are attached."""
    return _active([layer for _, layer in _layers(transformer)])


def _active(layers: list[LoraLayer]) -> Active:
    names = {"base" if layer.disable_adapters else ",".join(layer.active_adapters) for layer in layers}
    for active in ("default", "old", "anchor", "base"):
        if names == {active}:
            return active  # type: ignore[return-value]
    raise ValueError(f"all layers must use the same adapter; active: {sorted(names) or 'none, no adapter is attached'}")


def parameters(transformer: nn.Module, adapter: Adapter) -> dict[str, nn.Parameter]:
    """The live float32 parameters of an adapter (no copies) by name, in sorted order."""
    by_name: dict[str, nn.Parameter] = {}
    for path, layer in _layers(transformer):
        for factor, modules in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            weight = modules[adapter].weight
            assert isinstance(weight, nn.Parameter)
            by_name[f"{path}.{factor}"] = weight
    return dict(sorted(by_name.items()))


def factors(transformer: nn.Module, adapter: Adapter) -> dict[str, Tensor]:
    """Copies of an adapter's factors, float32, on the same device, by name in sorted order."""
    return {name: value.detach().clone() for name, value in parameters(transformer, adapter).items()}


def base_factors(factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same factors with B = 0: a policy that equals the base model."""
    return {name: torch.zeros_like(f) if name.endswith(".lora_B") else f for name, f in factors.items()}


@torch.no_grad()
def load_factors(transformer: nn.Module, adapter: Adapter, new: Mapping[str, Tensor]) -> None:
    """Overwrite an adapter's factors in place; their storage stays the same."""
    for name, value in parameters(transformer, adapter).items():
        value.copy_(new[name])


@torch.no_grad()
def decay_(transformer: nn.Module, decay: float, adapter: Adapter = "old") -> None:
    """old <- d · old + (1 - d) · default for `adapter` (``old`` or ``anchor``), in place, in float32; d = 0 copies."""
    trained = parameters(transformer, "default")
    for name, old in parameters(transformer, adapter).items():
        if decay == 0.0:
            old.copy_(trained[name])
        else:
            # Two products and a sum, each rounded separately: a fused operation would give other bits.
            old.mul_(decay).add_(trained[name] * (1.0 - decay))


class Ema:
    """Exponential moving average of the trained factors, in separate float32 copies.

    It is evaluated and saved, and never used to sample for training.
    """

    def __init__(self, factors: Mapping[str, Tensor]) -> None:
        self._factors = {name: factors[name].detach().float().clone() for name in sorted(factors)}

    @property
    def factors(self) -> dict[str, Tensor]:
        """Copies of the averaged factors by name, in sorted order."""
        return {name: value.clone() for name, value in self._factors.items()}

    @torch.no_grad()
    def update(self, trained: Mapping[str, Tensor], decay: float) -> None:
        """e <- e + (1 - decay) · (trained - e), in float32."""
        for name, value in self._factors.items():
            value.add_((trained[name].detach() - value) * (1.0 - decay))


def _layers(transformer: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    from peft.tuners.lora import LoraLayer

    for path, module in transformer.named_modules():
        if isinstance(module, LoraLayer):
            yield path, module


def _check_targets(transformer: nn.Module, targets: list[str]) -> None:
    """Raise UserError unless every target matches a linear layer as in PEFT: its path, or the end of it after a dot."""
    linears = [path for path, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(ends_in(path, [target]) for path in linears):
            names = sorted({path.rsplit(".", 1)[-1] for path in linears if not path[-1].isdecimal()})
            raise UserError(
                f"model.lora.targets has {target!r}, which ends the path of no linear layer of the "
                f"transformer; its layers end in {', '.join(names)}. Use some of these."
            )
    if not targets:
        raise UserError("model.lora.targets is empty; name the linear layers that receive LoRA factors, e.g. to_q.")
