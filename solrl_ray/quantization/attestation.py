"""What a worker really computes with, established by tests at its start (design law 5)."""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from solrl_ray.errors import RunError
from solrl_ray.noise import standard_normal
from solrl_ray.quantization import nvfp4
from solrl_ray.quantization.emulation import EmulatedNVFP4Linear
from solrl_ray.quantization.scope import UNQUANTIZED_TIERS, QuantizationReport, quantized_layers
from solrl_ray.records import Address

_LIBRARIES = ("torch", "diffusers", "transformers", "numpy", "solrl-ray")
_ROWS, _IN, _OUT = 48, 320, 96


def attest(model: nn.Module, tier: str, report: QuantizationReport) -> dict[str, str]:
    """Proves that `model` runs `tier` on its device; returns the name of each check → what it found.

    Raises:
        RunError: a known answer is not met, the product is inexact, or other layers are there than reported.
    """
    device = next(model.parameters()).device
    checks = {"layers": _check_layers(model, tier, report)}
    if tier in UNQUANTIZED_TIERS:
        checks["arithmetic"] = _check_dtype(model, tier)
        return checks
    checks["known-answer vectors"] = check_vectors(device)
    checks["product against exact arithmetic"] = check_product(device)
    return checks


def score_class(device: torch.device, tier: str, *, micro_batch: int, threads: int) -> str:
    """Digest (16 hex digits) of all that fixes the bits of a score beside its unit.

    Two workers of one class answer a unit with the same bits; scores of different classes never mix in one
    unit.
    """
    facts: dict[str, Any] = {
        "device": device_name(device),
        "tier": tier,
        "variant": nvfp4.VARIANT,
        "micro_batch": micro_batch,
        "threads": threads,
        "libraries": {name: metadata.version(name) for name in _LIBRARIES if _installed(name)},
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """``NVIDIA H200 (sm_90)``, or the CPU's model and the instruction set that torch's kernels use on it."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    if device.type == "cpu":
        return f"{_cpu_model()} ({torch.backends.cpu.get_cpu_capability()})"
    return str(device)


def known_answers() -> list[dict[str, Any]]:
    """The shipped test vectors of the quantiser."""
    text = resources.files("solrl_ray.quantization").joinpath("vectors.json").read_text()
    vectors: list[dict[str, Any]] = json.loads(text)["vectors"]
    return vectors


def check_vectors(device: torch.device) -> str:
    """Quantises every known-answer input on `device`. Raises `RunError` naming the first that differs."""
    vectors = known_answers()
    for vector in vectors:
        bits = np.frombuffer(bytes.fromhex(vector["input"]), dtype="<f4").reshape(vector["shape"])
        x = torch.from_numpy(bits.astype(np.float32)).to(device)
        quantized = nvfp4.quantize(x, vector["amax_override"], vector["tile"])
        found = (_hex(quantized.packed), _hex(quantized.scales), float(quantized.amax))
        wanted = (vector["packed"], vector["scales"], vector["amax"])
        if found != wanted:
            raise RunError(f"known answer {vector['name']} of NVFP4 is not met on {device}: {found}, not {wanted}")
    return f"{len(vectors)} of {len(vectors)}, variant {nvfp4.VARIANT}"


def check_product(device: torch.device) -> str:
    """Runs an emulated linear on addressed data with outliers against exact arithmetic of the same operands.

    Operands have 6 significant bits, so float64 holds every product, and every sum of this length, exactly.
    The allowance is what float32 accumulation in any order may lose: K roundings of the sum of magnitudes.

    Raises:
        RunError: an output is further off.
    """
    x, weight, bias = (_addressed(name, shape) for name, shape in _product_data().items())
    x[::7, ::31] *= 50
    linear = nn.Linear(_IN, _OUT)
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(bias[0])
    layer = EmulatedNVFP4Linear.from_linear(linear.to(device))
    with torch.no_grad():
        out = layer(x.to(device)).double().cpu()
    activation = nvfp4.quantize(x)
    quantized = layer.weight()
    operand, held = activation.operand().double(), quantized.operand().double().cpu()
    alpha = float(np.float32(activation.amax.item()) * np.float32(quantized.amax.item())) * nvfp4.ALPHA_UNIT
    exact = operand @ held.t() * alpha + bias[0].double()
    magnitude = operand.abs() @ held.abs().t() * alpha + bias[0].double().abs()
    error = ((out - exact).abs() / magnitude).max().item()
    allowed = (_IN + 4) * 2.0**-24
    if not error <= allowed:
        raise RunError(f"the emulated product on {device} is off by {error:.1e} of its magnitude, over {allowed:.1e}")
    return f"{out.numel()} outputs, largest error {error:.1e} of the sum of magnitudes"


def _check_layers(model: nn.Module, tier: str, report: QuantizationReport) -> str:
    found = quantized_layers(model)
    if report.tier != tier or set(found) != set(report.layers) or bool(found) == (tier in UNQUANTIZED_TIERS):
        raise RunError(
            f"{len(found)} layers of the model are quantised, but {len(report.layers)} were reported for "
            f"tier {report.tier} and {tier} was asked for"
        )
    linear = [m for m in model.modules() if isinstance(m, nn.Linear | EmulatedNVFP4Linear)]
    counts = Counter(type(module).__name__ for module in linear)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _check_dtype(model: nn.Module, tier: str) -> str:
    wanted = torch.bfloat16 if tier == "bf16" else torch.float32
    other = [name for name, module in model.named_modules() if _dtype(module) not in (None, wanted)]
    if other:
        raise RunError(f"tier {tier} was asked for, but {len(other)} linears are not {wanted}, first {other[0]}")
    return f"{wanted}".removeprefix("torch.")


def _dtype(module: nn.Module) -> torch.dtype | None:
    return module.weight.dtype if isinstance(module, nn.Linear) else None


def _product_data() -> dict[str, tuple[int, int]]:
    return {"activation": (_ROWS, _IN), "weight": (_OUT, _IN), "bias": (1, _OUT)}


def _addressed(name: str, shape: tuple[int, int]) -> torch.Tensor:
    address = Address(run_seed=0, purpose="attestation", prompt_id=name)
    return torch.from_numpy(standard_normal(address, shape))


def _hex(tensor: torch.Tensor) -> str:
    return tensor.cpu().contiguous().numpy().tobytes().hex()


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _cpu_model() -> str:
    """The CPU's model name where the system tells it: kernels choose their blocking by model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
