"""What do an FP8 explorer's kernels between its linears cost, and what could replace them? On one GPU.

    python benchmarks/explorer_kernels.py [--repeats 10] [--out FOLDER]

Three kinds, at the shapes of SD3.5-Large (1024 px) and FLUX.1-dev (512 and 1024 px), 24 images at once:

    attention   PyTorch's choice in bfloat16, FlashAttention 3 in bfloat16, and FlashAttention 3 in FP8 with one
                power-of-two scale a head, quantisation included. FlashAttention 3 is measured where one of its
                packages (flash_attn_3, fa3-fwd) is installed.
    GELU        with the rows quantised for the next linear: as the models write it (tanh), and as
                `quantization.gelu` does (sigmoid), compiled.
    norm        LayerNorm and modulation with the rows quantised, compiled.

GELU and norm are compiled twice: with the compiler's defaults and with `coordinate_descent_tuning`, which tries other
block sizes. Prints a table with medians of CUDA events, rates and relative errors; writes explorer_kernels.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_ray.quantization.attestation import device_name
from solrl_ray.quantization.fp8 import quantize_rows, row_scale
from solrl_ray.quantization.gelu import sigmoid_gelu

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("flash_attn_interface", "fa3_fwd_interface")
ATTENTION = {
    "SD3.5-L, 1024 px": (24, 38, 4096 + 205, 64),
    "FLUX, 512 px": (24, 24, 1024 + 128, 128),
    "FLUX, 1024 px": (8, 24, 4096 + 128, 128),
}
"""Batch, heads, tokens, width of a head."""
ROWS = {"SD3.5-L, 1024 px": (24, 4096, 2432, 9728), "FLUX, 512 px": (24, 1024 + 128, 3072, 12288)}
"""Batch, tokens, width, width of the feed-forward."""
TUNING: dict[str, dict[str, Any]] = {"defaults": {}, "coordinate descent": {"coordinate_descent_tuning": True}}


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def flash_attention() -> tuple[str, Any]:
    """The name of the FlashAttention 3 package that is installed, and its module; empty and None without one."""
    for name in PACKAGES:
        try:
            return name, importlib.import_module(name)
        except ImportError:
            continue
    return "", None


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [batch, heads, tokens, width] → E4M3 codes [batch, tokens, heads, width], scales [batch, heads]."""
    scale = row_scale(x.abs().amax(dim=(2, 3)).float().unsqueeze(-1)).squeeze(-1)
    codes = (x.float() * (1.0 / scale)[:, :, None, None]).to(torch.float8_e4m3fn)
    return codes.transpose(1, 2).contiguous(), scale


def flash(module: Any, q: Tensor, k: Tensor, v: Tensor, **scales: Tensor) -> Tensor:
    """FlashAttention 3 on [batch, tokens, heads, width]."""
    out: Tensor = module._flash_attn_forward(q, k, v, softmax_scale=q.shape[-1] ** -0.5, **scales)[0]
    return out


def attentions(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """What can be done with q, k, v [batch, heads, tokens, width]."""
    sides: dict[str, Callable[[], Tensor]] = {"PyTorch, bfloat16": lambda: F.scaled_dot_product_attention(q, k, v)}
    package, module = flash_attention()
    if not package:
        return sides
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def in_fp8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (qc, qs), (kc, ks), (vc, vs) = quantize_heads(q), quantize_heads(k), quantize_heads(v)
        return flash(module, qc, kc, vc, q_descale=qs, k_descale=ks, v_descale=vs)

    torch._dynamo.reset()
    compiled = torch.compile(in_fp8, dynamic=False, fullgraph=True)
    return sides | {
        f"{package}, bfloat16": lambda: flash(module, *turned).transpose(1, 2),
        f"{package}, FP8 with quantisation": lambda: compiled(q, k, v).transpose(1, 2),
    }


def attention(repeats: int) -> Iterator[dict[str, Any]]:
    for title, (batch, heads, tokens, width) in ATTENTION.items():
        q, k, v = (torch.randn(batch, heads, tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        exact = F.scaled_dot_product_attention(q[:1].float(), k[:1].float(), v[:1].float())
        flops = 4 * batch * heads * tokens**2 * width
        for name, run in attentions(q, k, v).items():
            elapsed = milliseconds(run, repeats)
            error = float((run()[:1].float() - exact).norm() / exact.norm())
            yield {
                "kind": "attention",
                "shape": title,
                "what": name,
                "milliseconds": round(elapsed, 3),
                "tflops": round(flops / elapsed / 1e9),
                "error": round(error, 4),
            }


def rowwise(repeats: int) -> Iterator[dict[str, Any]]:
    def tanh(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_rows(F.gelu(x, approximate="tanh").float())

    def sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_rows(sigmoid_gelu(x).float())

    def norm(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        out = F.layer_norm(x, (x.shape[-1],), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
        return quantize_rows(out.flatten(0, 1).float())

    for title, (batch, tokens, width, wide) in ROWS.items():
        hidden = torch.randn(batch * tokens, wide, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(batch, tokens, width, device="cuda", dtype=torch.bfloat16)
        modulation = torch.randn(batch, width, device="cuda", dtype=torch.bfloat16)
        jobs: list[tuple[str, str, Any, tuple[Tensor, ...]]] = [
            ("GELU", "tanh", tanh, (hidden,)),
            ("GELU", "sigmoid", sigmoid, (hidden,)),
            ("norm", "LayerNorm, modulation", norm, (x, modulation, modulation)),
        ]
        for kind, what, run, inputs in jobs:
            for tuning, options in TUNING.items():
                torch._dynamo.reset()
                compiled = torch.compile(run, dynamic=False, fullgraph=True, options=options)
                elapsed = milliseconds(partial(compiled, *inputs), repeats)
                terabytes = 3 * inputs[0].numel() / elapsed / 1e9  # two bytes read, one written
                yield {
                    "kind": kind,
                    "shape": title,
                    "what": f"{what}, {tuning}",
                    "milliseconds": round(elapsed, 3),
                    "terabytes_per_second": round(terabytes, 2),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = []
    for job in (attention, rowwise):
        for row in job(arguments.repeats):
            results.append(row)
            print("  ".join(f"{key} {value}" if not isinstance(value, str) else value for key, value in row.items()))
    content = {
        "question": "cost of an FP8 explorer's kernels between its linears, and of what could replace them",
        "statistic": f"median of {arguments.repeats} after 3 warm-ups",
        "device": device_name(torch.device("cuda")),
        "torch": torch.__version__,
        "results": results,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "explorer_kernels.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
