"""How often is an emulated NVFP4 linear not exact arithmetic rounded once to bfloat16?

    python benchmarks/emulation_error.py [--outputs 1000000] [--device cpu] [--out FOLDER]

Exact arithmetic: operands hold few significant bits, so float64 has every product and every sum exactly; with alpha and
the bias it rounds far below bfloat16. Compared for random layers of several K, normal activations, outlier channels:

* ``float32 operands``: `EmulatedNVFP4Linear` as it runs on a CPU;
* ``bfloat16 operands``: its scheme on a GPU, bfloat16 operands and float32 accumulation. On a CPU that is worked out in
  float32 from the bfloat16 operands; on `--device cuda` it is the layer itself;
* ``global scale folded in``: what the scheme avoids, operands rounded to bfloat16 with their global scales.

Counts outputs that differ at all and those more than one bfloat16 ulp off. Prints a table; writes emulation_error.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from solrl_ray.quantization import nvfp4
from solrl_ray.quantization.attestation import device_name, exact_product
from solrl_ray.quantization.emulation import EmulatedNVFP4Linear

RESULTS = Path(__file__).parent / "results"
SHAPES = ((256, 256), (1024, 512), (3072, 512), (12288, 128))
AIM = 1e-4
"""Share of outputs more than one ulp off, at most."""


def ulps(found: Tensor, exact: Tensor) -> Tensor:
    """|found - exact|, of bfloat16 `found` and float64 `exact`, in units of bfloat16's last place at `exact`."""
    _, exponent = torch.frexp(exact.abs().clamp(min=2.0**-126))
    return (found.double() - exact).abs() / torch.ldexp(torch.ones_like(exact), exponent - 8)


def schemes(layer: EmulatedNVFP4Linear, x: Tensor) -> dict[str, Tensor]:
    """Scheme → its bfloat16 outputs, on the CPU."""
    if x.device.type != "cpu":
        return {"bfloat16 operands": layer(x.to(torch.bfloat16)).cpu()}
    activation, weight = nvfp4.quantize(x), layer.weight()
    alpha = activation.amax * weight.amax * nvfp4.ALPHA_UNIT
    halves = [tensor.operand(torch.bfloat16).float() for tensor in (activation, weight)]
    folded = [tensor.dequantize().to(torch.bfloat16).float() for tensor in (activation, weight)]
    bias = layer.bias if layer.bias is not None else torch.zeros(layer.out_features)
    return {
        "float32 operands": layer(x).to(torch.bfloat16),
        "bfloat16 operands": (halves[0] @ halves[1].t() * alpha + bias).to(torch.bfloat16),
        "global scale folded in": (folded[0] @ folded[1].t() + bias).to(torch.bfloat16),
    }


@torch.no_grad()
def measure(outputs: int, device: torch.device) -> dict[str, dict[str, float]]:
    counted: dict[str, dict[str, float]] = {}
    generator = torch.Generator().manual_seed(0)
    for inputs, features in SHAPES:
        rows = -(-outputs // (len(SHAPES) * features))
        linear = nn.Linear(inputs, features)
        linear.weight.copy_(torch.randn(features, inputs, generator=generator) / inputs**0.5)
        linear.bias.copy_(torch.randn(features, generator=generator))
        layer = EmulatedNVFP4Linear.from_linear(linear.to(device))
        x = torch.randn(rows, inputs, generator=generator)
        x[:, ::97] *= 20
        x = x.to(torch.bfloat16).float()
        exact, _ = exact_product(layer, x)
        for scheme, out in schemes(layer, x.to(device)).items():
            into = counted.setdefault(scheme, {"outputs": 0, "not rounded exactly": 0, "beyond one ulp": 0})
            into["outputs"] += out.numel()
            into["not rounded exactly"] += int((out != exact.float().to(torch.bfloat16)).sum())
            into["beyond one ulp"] += int((ulps(out, exact) > 1).sum())
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--outputs", type=int, default=1_000_000)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    counted = measure(arguments.outputs, arguments.device)
    for scheme, counts in counted.items():
        for name in ("not rounded exactly", "beyond one ulp"):
            counts[f"share {name}"] = counts[name] / counts["outputs"]
        print(
            f"{scheme:<24} {counts['outputs']:>9,.0f} outputs  not rounded exactly "
            f"{counts['share not rounded exactly']:.2e}  beyond one bfloat16 ulp {counts['share beyond one ulp']:.2e}"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = {
        "question": "share of emulated NVFP4 outputs that are not exact arithmetic rounded once to bfloat16",
        "shapes (in, out)": SHAPES,
        "aim: share beyond one ulp": AIM,
        "device": device_name(arguments.device),
        "torch": torch.__version__,
        "results": counted,
    }
    name = "emulation_error.json" if arguments.device.type == "cpu" else f"emulation_error_{arguments.device.type}.json"
    (arguments.out / name).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
