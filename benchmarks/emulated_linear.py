"""What does an emulated NVFP4 linear cost beside the float32 linear it replaces, at the testbed's shapes on a
CPU?

Times `EmulatedNVFP4Linear` and `nn.Linear` in turn, so that both meet the same disturbances, and compares the
fastest of each: single layers, the projections of one input together (they share its quantisation), and whole
blocks and the whole transformer of the testbed's architecture. Aim: at most 1.5 times the float32 linear.

    python benchmarks/emulated_linear.py [--repeats 100] [--threads 1 2]

Prints a table; writes benchmarks/results/emulated_linear.json and .png.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import matplotlib
import torch
from torch import nn

from solrl_ray.config.schema import QuantizationScope
from solrl_ray.quantization.activations import ActivationQuantizer
from solrl_ray.quantization.attestation import device_name
from solrl_ray.quantization.emulation import EmulatedNVFP4Linear
from solrl_ray.quantization.scope import quantize_
from solrl_ray.testbed.architecture import flux_pipeline

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = Path(__file__).parent / "results"
BATCH, IMAGE_TOKENS, TEXT_TOKENS = 24, 64, 24
ROWS = {
    "single block": BATCH * (IMAGE_TOKENS + TEXT_TOKENS),
    "image stream": BATCH * IMAGE_TOKENS,
    "text stream": BATCH * TEXT_TOKENS,
}
SHAPES = ((128, 128), (128, 512), (512, 128), (640, 128))
SCOPE = QuantizationScope(skip=["x_embedder", "context_embedder", "time_text_embed", "norm", "^proj_out"])
AIM = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    threads: int
    what: str
    rows: int
    float32_us: float
    """Fastest repetition, microseconds."""
    emulated_us: float

    @property
    def ratio(self) -> float:
        return self.emulated_us / self.float32_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    measured: list[Measured] = []
    load_before = os.getloadavg()[0]
    with torch.no_grad():
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            for result in measure(threads, arguments.repeats):
                measured.append(result)
                print(
                    f"{threads} thread(s)  {result.what:<44} {result.rows:>5} rows  "
                    f"float32 {result.float32_us:8.0f} us  emulated {result.emulated_us:8.0f} us  "
                    f"{result.ratio:5.2f} x",
                    flush=True,
                )
    write(measured, load_before, arguments.repeats)


def measure(threads: int, repeats: int) -> Iterable[Measured]:
    for rows in ROWS.values():
        for inputs, outputs in SHAPES:
            yield _layers(threads, rows, f"{inputs} -> {outputs}", [(inputs, outputs)], repeats)
        yield _layers(threads, rows, "query, key, value: 3 x (128 -> 128)", [(128, 128)] * 3, repeats)
    yield _layers(
        threads,
        ROWS["single block"],
        "single block: query, key, value, proj_mlp",
        [(128, 128)] * 3 + [(128, 512)],
        repeats,
    )
    yield from _transformer(threads, repeats)


def _layers(threads: int, rows: int, what: str, shapes: list[tuple[int, int]], repeats: int) -> Measured:
    """Linears that consume one tensor; each repetition gets a new one, so nothing is carried over."""
    quantizer = ActivationQuantizer()
    linears = [nn.Linear(*shape) for shape in shapes]
    emulated = [EmulatedNVFP4Linear.from_linear(linear, quantizer) for linear in linears]
    x = torch.randn(rows, shapes[0][0], generator=torch.Generator().manual_seed(0))

    def run(layers: list[nn.Linear] | list[EmulatedNVFP4Linear]) -> None:
        same = x.view(rows, -1)  # a new object, which the quantiser does not know from the last repetition
        for layer in layers:
            layer(same)

    plain, quantized = fastest(lambda: run(linears), lambda: run(emulated), repeats)
    return Measured(threads=threads, what=what, rows=rows, float32_us=plain, emulated_us=quantized)


def _transformer(threads: int, repeats: int) -> Iterable[Measured]:
    """The testbed's untrained transformer: one double block, one single block, all of it."""
    model = flux_pipeline(seed=0).transformer.eval()
    quantized = copy.deepcopy(model)
    quantize_(quantized, "nvfp4-emulated", SCOPE)
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(BATCH, IMAGE_TOKENS, 128, generator=generator)
    text = torch.randn(BATCH, TEXT_TOKENS, 128, generator=generator)
    conditioning = torch.randn(BATCH, 128, generator=generator)
    ids = torch.zeros(TEXT_TOKENS + IMAGE_TOKENS, 3)
    rotary = model.pos_embed(ids)
    block_inputs = {
        "hidden_states": image,
        "encoder_hidden_states": text,
        "temb": conditioning,
        "image_rotary_emb": rotary,
    }
    whole_inputs = {
        "hidden_states": torch.randn(BATCH, IMAGE_TOKENS, 16, generator=generator),
        "encoder_hidden_states": torch.randn(BATCH, TEXT_TOKENS, 64, generator=generator),
        "pooled_projections": torch.randn(BATCH, 64, generator=generator),
        "timestep": torch.full((BATCH,), 0.5),
        "guidance": torch.ones(BATCH),
        "img_ids": ids[TEXT_TOKENS:],
        "txt_ids": ids[:TEXT_TOKENS],
    }
    for what, part, inputs in (
        ("double block, everything in it", "transformer_blocks.0", block_inputs),
        ("single block, everything in it", "single_transformer_blocks.0", block_inputs),
        ("whole transformer", "", whole_inputs),
    ):
        pair = model.get_submodule(part), quantized.get_submodule(part)
        plain, emulated = fastest(
            partial(pair[0], **inputs),
            partial(pair[1], **inputs),
            max(repeats // 4, 10),
        )
        rows = ROWS["single block"]
        yield Measured(threads=threads, what=what, rows=rows, float32_us=plain, emulated_us=emulated)


def fastest(first: Callable[[], object], second: Callable[[], object], repeats: int) -> tuple[float, float]:
    """The fastest repetition of each in microseconds, run in turn."""
    best = [float("inf"), float("inf")]
    for repetition in range(repeats + 3):
        for index, function in enumerate((first, second)):
            started = time.perf_counter()
            function()
            seconds = time.perf_counter() - started
            if repetition >= 3:
                best[index] = min(best[index], seconds * 1e6)
    return best[0], best[1]


def write(measured: list[Measured], load_before: float, repeats: int) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = {
        "question": "time of an emulated NVFP4 linear over the float32 linear on a CPU",
        "statistic": "fastest repetition of each, run in turn",
        "device": device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "load_before": load_before,
        "torch": torch.__version__,
        "repeats": repeats,
        "aim": AIM,
        "results": [asdict(result) | {"ratio": round(result.ratio, 3)} for result in measured],
    }
    (RESULTS / "emulated_linear.json").write_text(json.dumps(content, indent=1) + "\n")
    labels = list(dict.fromkeys((result.what, result.rows) for result in measured))
    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(labels) + 1.2), layout="constrained")
    for threads in sorted({result.threads for result in measured}):
        chosen = [result for result in measured if result.threads == threads]
        axes.plot(
            [result.ratio for result in chosen],
            [labels.index((result.what, result.rows)) for result in chosen],
            "o",
            label=f"{threads} thread" + "s" * (threads > 1),
        )
    axes.axvline(AIM, color="grey", linestyle="--", label="aim")
    axes.set_yticks(range(len(labels)), [f"{what}, {rows} rows" for what, rows in labels])
    axes.invert_yaxis()
    axes.set_xlim(left=1)
    axes.set_xlabel("time over float32")
    axes.set_title("Emulated NVFP4 linear on a CPU")
    axes.legend()
    figure.savefig(RESULTS / "emulated_linear.png", dpi=110)


if __name__ == "__main__":
    main()
