"""Attestation: tests at a worker's start that prove which arithmetic it computes with (design law 5). Also the score
class, the digest of everything that determines the bits of a score.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections import Counter
from collections.abc import Callable
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from solrl_ray.config.guidance import Cfg
from solrl_ray.config.strategies import UNQUANTIZED_TIERS
from solrl_ray.errors import RunError
from solrl_ray.quantization import capability, fp8, nvfp4
from solrl_ray.quantization.layers import QuantizedLinear
from solrl_ray.quantization.scope import LAYERS, QuantizationReport, quantized_layers
from solrl_ray.quantization.transformer_engine import engine_codes
from solrl_ray.records import Address
from solrl_ray.sampling.noise import standard_normal

_LIBRARIES = (
    "torch",
    "torchvision",
    "diffusers",
    "transformers",
    "transformer-engine-torch",
    "open-clip-torch",
    "numpy",
    "solrl-ray",
)
_ROWS, _IN, _OUT = 48, 320, 96


def attest(model: nn.Module, tier: str, report: QuantizationReport) -> dict[str, str]:
    """Proves that `model` runs `tier` on its device; returns name of each check → result.

    Raises RunError: a known answer is wrong, a product is inexact, or the layers are not those of `report`.
    """
    device = next(model.parameters()).device
    checks = {"layers": _check_layers(model, tier, report)}
    if tier in UNQUANTIZED_TIERS:
        checks["arithmetic"] = _check_dtype(model, tier)
        return checks
    checks["scope"] = report.sentence()
    return checks | check_tier(tier, device)


def score_class(
    device: torch.device, tier: str, *, micro_batch: int, threads: int, compiled: str = "", cfg: Cfg | None = None
) -> str:
    """Digest (16 hex digits) of everything except the unit of work that determines the bits of a score.

    Workers of one class compute the same bits for a unit. Scores of different classes are never mixed in one unit.

    Args:
        compiled: how the forward is compiled; empty if it is not.
        cfg: classifier-free guidance; part of the digest only if it is on.
    """
    facts: dict[str, Any] = {
        "device": device_name(device),
        "tier": tier,
        "variant": nvfp4.VARIANT,
        "micro_batch": micro_batch,
        "threads": threads,
        "libraries": {name: version for name in _LIBRARIES if (version := _version(name))},
        "cuda": [torch.version.cuda, torch.backends.cudnn.version()] if device.type == "cuda" else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if compiled:
        facts["compiled"] = {"how": compiled, "triton": _version("triton")}
    if cfg is not None and cfg.is_on:
        facts["cfg"] = cfg.model_dump(mode="json")
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """Name of a device: ``NVIDIA H200 (sm_90)``, or the CPU's model and the instruction set of torch's kernels."""
    if device.type == "cpu":
        return f"{_cpu_model()} ({torch.backends.cpu.get_cpu_capability()})"
    return capability.device_name(device)


def check_vectors(device: torch.device) -> str:
    """Quantises all known-answer inputs on `device`. Raises `RunError` naming the first wrong answer."""
    vectors = json.loads(resources.files("solrl_ray.quantization").joinpath("vectors.json").read_text())["vectors"]
    for vector in vectors:
        bits = np.frombuffer(bytes.fromhex(vector["input"]), dtype="<f4").reshape(vector["shape"])
        x = torch.from_numpy(bits.astype(np.float32)).to(device)
        quantized = nvfp4.quantize(x, vector["amax_override"])
        found = (_hex(quantized.packed), _hex(quantized.scales), float(quantized.amax))
        wanted = (vector["packed"], vector["scales"], vector["amax"])
        if found != wanted:
            raise RunError(f"known answer {vector['name']} of NVFP4 is not met on {device}: {found}, not {wanted}")
    return f"{len(vectors)} of {len(vectors)}, variant {nvfp4.VARIANT}"


def check_tier(tier: str, device: torch.device) -> dict[str, str]:
    """Self-test of a tier on a device: known answers, a product, and the kernel that computes it.

    Raises RunError: a known answer is wrong, the product is inexact, or its kernel is of another format.
    """
    checks: dict[str, str] = {}
    if LAYERS[tier].format == "nvfp4":
        checks["known-answer vectors"] = check_vectors(device)
    if tier == "nvfp4":
        checks["Transformer Engine's codes"] = check_engine_codes(device)
    if LAYERS[tier].format == "fp8-row":
        checks["FP8 rows"] = check_fp8_rows(device)
    checks["product against exact arithmetic"] = check_product(device, tier)
    if tier in _KERNELS and device.type == "cuda":
        checks["kernel"] = check_kernel(device, tier)
    return checks


def check_engine_codes(device: torch.device) -> str:
    """Quantises an activation with Transformer Engine. Raises `RunError` unless its bits equal those of `nvfp4`."""
    x = _addressed("activation", (_ROWS, _IN)).to(torch.bfloat16)
    reference = nvfp4.quantize(x)
    wanted = {"packed": reference.packed, "scales": reference.scales, "amax": reference.amax}
    for name, tensor in zip(wanted, engine_codes(x.to(device)), strict=True):
        if _hex(tensor) != _hex(wanted[name]):
            raise RunError(
                f"{name} from Transformer Engine on {device} differ from those of variant {nvfp4.VARIANT}: "
                "this version of Transformer Engine cannot be used for previews"
            )
    return f"{x.numel()} values, bit for bit variant {nvfp4.VARIANT}"


def check_fp8_rows(device: torch.device) -> str:
    """Quantises rows of many magnitudes on `device`. Raises `RunError` unless the bits equal those of the CPU."""
    magnitudes = torch.exp2(torch.linspace(-110, 110, _ROWS)).unsqueeze(1)
    x = _addressed("activation", (_ROWS, _IN)) * magnitudes
    x[0] = 0
    wanted, found = fp8.quantize_rows(x), fp8.quantize_rows(x.to(device))
    for name, one, other in zip(("codes", "scales"), wanted, found, strict=True):
        if _hex(one.view(torch.uint8)) != _hex(other.view(torch.uint8)):
            raise RunError(f"{name} of FP8 rows on {device} differ from the CPU's")
    return f"{_ROWS} rows, bit for bit as on the CPU"


def check_product(device: torch.device, tier: str = "nvfp4-emulated") -> str:
    """Compares a tier's linear with exact arithmetic on the same operands: addressed data with outliers.

    The operands have few significant bits, so float64 holds every product and every sum of this length exactly. The
    limit is `TOLERANCE`, relative to the sum of magnitudes.

    Raises RunError if the error of an output exceeds it.
    """
    x, layer = _product_layer(device, tier)
    with torch.no_grad():
        out = layer(x.to(device)).double().cpu()
    exact, magnitude = exact_product(layer, x)
    error = ((out - exact).abs() / magnitude).max().item()
    allowed = TOLERANCE["cpu" if device.type == "cpu" else "cuda", tier](_IN)
    if not error <= allowed:
        raise RunError(
            f"the {tier} product on {device} is off by {error:.1e} of its magnitude; allowed is {allowed:.1e}"
        )
    return f"{out.numel()} outputs, largest error {error:.1e} of the sum of magnitudes, allowed {allowed:.1e}"


TOLERANCE: dict[tuple[str, str], Callable[[int], float]] = {
    ("cpu", "nvfp4-emulated"): lambda k: (k + 4) * 2.0**-24,
    ("cuda", "nvfp4-emulated"): lambda k: (k + 4) * 2.0**-24,
    ("cuda", "nvfp4"): lambda k: (k + 4) * 2.0**-24 + 2.0**-8,
    ("cpu", "fp8"): lambda k: (k + 4) * 2.0**-24 + 2.0**-8,
    ("cuda", "fp8"): lambda k: (k / 32 + 1) * 2.0**-13 + 2.0**-8,
}
"""(device type, tier) → K → allowed error of a product of K terms, relative to the sum of magnitudes.

Accumulation in float32, in any order, costs at most K roundings. A bfloat16 output adds a rounding of 2^-9, counted
twice. FP8 tensor cores add 32 terms at a time, to an accumulator that keeps 13 bits below the largest of them.
"""


def exact_product(layer: QuantizedLinear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact output of a quantised linear for x [rows, in], and the sum of magnitudes: float64 [rows, out], CPU."""
    held = {name: tensor.cpu() for name, tensor in layer.tensors().items()}
    if layer.format == "nvfp4":
        activation = nvfp4.quantize(nvfp4.pad_columns(x.cpu().float()))
        weight = nvfp4.NVFP4Tensor(**held)
        operand, other = activation.operand().double(), weight.operand().double()
        alpha = float(np.float32(activation.amax.item()) * np.float32(weight.amax.item())) * nvfp4.ALPHA_UNIT
    else:
        codes, scale = fp8.quantize_rows(x.cpu().float())
        operand = codes.double() * scale.double()
        other = held["codes"].view(torch.float8_e4m3fn).double() * held["scale"].double().unsqueeze(1)
        alpha = 1.0
    bias = torch.zeros(layer.out_features) if layer.bias is None else layer.bias.cpu()
    exact = operand @ other.t() * alpha + bias.double()
    return exact, operand.abs() @ other.abs().t() * alpha + bias.double().abs()


_KERNELS = {"fp8": r"e4m3|f8|fp8|nvjet_(sm\d+_)?q", "nvfp4": r"e2m1|fp4|f4|nvjet_(sm\d+_)?o"}
"""Tier → pattern in the name of its matrix product kernel (CUTLASS and cuBLAS name the operand type)."""


def check_kernel(device: torch.device, tier: str) -> str:
    """Name of the kernel that computes a tier's product, from the profiler.

    Raises RunError if the kernel is not of the tier's format.
    """
    x, layer = _product_layer(device, tier)
    with torch.no_grad():
        held = layer(x.to(device))
        torch.cuda.synchronize(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            layer(x.to(device, held.dtype))
            torch.cuda.synchronize(device)
    names = [event.key for event in profile.key_averages() if event.device_type.name == "CUDA"]
    if not names:
        return "unknown: the profiler reports no kernels on this machine"
    products = [name for name in names if re.search(r"gemm|cutlass|nvjet|matmul|mm_", name, re.IGNORECASE)]
    fitting = [name for name in products if re.search(_KERNELS[tier], name, re.IGNORECASE)]
    if not fitting:
        raise RunError(f"tier {tier} on {device} runs no kernel of its format, but {products or names}")
    return fitting[0][:120]


def _product_layer(device: torch.device, tier: str) -> tuple[torch.Tensor, QuantizedLinear]:
    x = _addressed("activation", (_ROWS, _IN))
    x[::7, ::31] *= 50
    linear = nn.Linear(_IN, _OUT)
    with torch.no_grad():
        linear.weight.copy_(_addressed("weight", (_OUT, _IN)))
        linear.bias.copy_(_addressed("bias", (1, _OUT))[0])
    return x, LAYERS[tier].from_linear(linear.to(device))


def _check_layers(model: nn.Module, tier: str, report: QuantizationReport) -> str:
    layers = quantized_layers(model)
    if report.tier != tier or set(layers) != set(report.layers) or bool(layers) == (tier in UNQUANTIZED_TIERS):
        raise RunError(
            f"{len(layers)} layers of the model are quantised, but {len(report.layers)} were reported for "
            f"tier {report.tier}, and {tier} was requested"
        )
    linear = [m for m in model.modules() if isinstance(m, nn.Linear | QuantizedLinear)]
    counts = Counter(type(module).__name__ for module in linear)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _check_dtype(model: nn.Module, tier: str) -> str:
    wanted = torch.bfloat16 if tier == "bf16" else torch.float32
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())  # diffusers loads these modules in float32
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    other = [
        name
        for name, linear in linears
        if linear.weight.dtype != (torch.float32 if kept.intersection(name.split(".")) else wanted)
    ]
    if other:
        raise RunError(f"tier {tier} was requested, but {len(other)} linears are not {wanted}; the first is {other[0]}")
    return f"{wanted}".removeprefix("torch.")


def _addressed(name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Standard normals that are the same on every machine: float32 `shape` on the CPU."""
    address = Address(run_seed=0, purpose="attestation", prompt_id=name)
    return torch.from_numpy(standard_normal(address, shape))


def _hex(tensor: torch.Tensor) -> str:
    """The tensor's bytes in hex."""
    return tensor.cpu().contiguous().numpy().tobytes().hex()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """Model name of the CPU, if the system reports it: kernels choose their blocking by model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
