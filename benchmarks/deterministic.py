"""What does `run.deterministic` cost on a GPU, and do two processes then compute the same bits?

    python benchmarks/deterministic.py [--layers 4] [--batch 12] [--repeats 5] [--out FOLDER]
    python benchmarks/deterministic.py --runs [--layers 4] [--work FOLDER] [--out FOLDER]

Blocks of FLUX.1-dev at 512 px with random weights: a compiled forward in bfloat16 and in FP8, and a learner's forward
and backward through gradient checkpointing, in processes of their own: two with deterministic kernels and two without,
in turn. A digest is SHA-256 over the outputs, of the last over the gradients of the attention's projections.

With `--runs` whole runs instead (`full_iteration.py flux --layers N`): with and without `run.deterministic`, each once
with one explorer and once with two, of which the second has a process and a GPU of its own. Their digests, and seconds
of the iterations after the first, which compiles. Needs two GPUs.

Prints a table; writes deterministic.json or deterministic_runs.json into FOLDER (default benchmarks/results).
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forward import EMBEDDERS, build, flux_inputs
from torch import Tensor, nn

from actors.workers.devices import use_deterministic_kernels
from solrl_ray.config.schema import Compile, QuantizationScope
from solrl_ray.models.attention import choose_for_training
from solrl_ray.models.compilation import compile_
from solrl_ray.quantization.attestation import device_name
from solrl_ray.quantization.scope import quantize_

RESULTS = Path(__file__).parent / "results"
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
PASSES = ("bf16", "fp8", "training")
ITERATIONS = 3


def digest(tensors: list[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return total.hexdigest()


def seconds(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One process: seconds and digest of each pass."""
    if arguments.deterministic:
        use_deterministic_kernels()
    device = torch.device("cuda")
    model: Any = build("flux", device, arguments.layers)
    generator = torch.Generator(device).manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    inputs = flux_inputs(arguments.batch, randn)
    found = {}
    for tier in ("bf16", "fp8"):
        network = copy.deepcopy(model)
        if tier == "fp8":
            quantize_(network, tier, QuantizationScope(skip=[*EMBEDDERS, "norm", "^proj_out"]))
        compile_(network, Compile(), device, tier)

        def forward(network: nn.Module = network) -> list[Tensor]:
            with torch.no_grad():
                return [network(**inputs, return_dict=False)[0]]

        found[tier] = result(forward, arguments.repeats)
    choose_for_training()
    model.requires_grad_(False)
    model.enable_gradient_checkpointing()
    weights = [m.weight for n, m in model.named_modules() if n.endswith(TARGETS) and isinstance(m, nn.Linear)]
    for weight in weights:
        weight.requires_grad_(True)

    def train() -> list[Tensor]:
        loss = model(**inputs, return_dict=False)[0].float().square().mean()
        return list(torch.autograd.grad(loss, weights))

    found["training"] = result(train, arguments.repeats)
    return found


def result(run: Callable[[], list[Tensor]], repeats: int) -> dict[str, Any]:
    run()
    return {"digest": digest(run()), "seconds": seconds(run, repeats)}


def whole_run(arguments: argparse.Namespace, deterministic: bool, explorers: int) -> dict[str, Any]:
    name = f"{'deterministic' if deterministic else 'default'}-{explorers}"
    command: list[str | Path] = [sys.executable, Path(__file__).with_name("full_iteration.py"), "flux", "--name", name]
    command += ["--layers", str(arguments.layers), "--iterations", str(ITERATIONS)]
    command += ["--work", arguments.work, "--out", arguments.work]
    command += ["--set", f"run.deterministic={str(deterministic).lower()}"]
    command += ["--set", f"fleet.explorers={{count: {explorers}, num_gpus: 1, threads: 4}}"]
    subprocess.run(command, check=True)
    run = json.loads((arguments.work / f"full_iteration_{name}.json").read_text())
    steady = [entry["seconds"]["total"] for entry in run["iterations"][1:]]
    return {
        "deterministic": deterministic,
        "explorers": explorers,
        "seconds": statistics.fmean(steady),
        "iterations": run["iterations"],
        "selection_digest": run["summary"]["selection_digest"],
        "lora_digest": run["summary"]["lora_digest"],
    }


def whole_runs(arguments: argparse.Namespace) -> None:
    """Four runs; the file is written anew after each."""
    content: dict[str, Any] = {
        "question": "digests of whole runs, with and without run.deterministic",
        "device": device_name(torch.device("cuda")),
        "torch": torch.__version__,
        "layers": arguments.layers,
        "runs": [],
    }
    for deterministic in (True, False):
        for explorers in (1, 2):
            content["runs"].append(run := whole_run(arguments, deterministic, explorers))
            (arguments.out / "deterministic_runs.json").write_text(json.dumps(content, indent=1) + "\n")
            print(
                f"run.deterministic {deterministic!s:<5} {explorers} explorers: {run['seconds']:6.2f} s an iteration, "
                f"selection {run['selection_digest'][:12]}, LoRA {run['lora_digest'][:12]}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="blocks of each kind")
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--runs", action="store_true", help="whole runs instead, a minute or two each")
    parser.add_argument("--work", type=Path, default=Path("full_size"), help="their checkpoint and run folders")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--deterministic", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments)))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.runs:
        whole_runs(arguments)
        return
    processes: dict[str, list[dict[str, Any]]] = {"deterministic": [], "default": []}
    for _ in range(2):
        for kind, found in processes.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--one"]
            command += ["--deterministic"] if kind == "deterministic" else []
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    rows = []
    for name in PASSES:
        times = {kind: statistics.median(f[name]["seconds"] for f in found) for kind, found in processes.items()}
        same = {kind: len({f[name]["digest"] for f in found}) == 1 for kind, found in processes.items()}
        rows.append({"pass": name, "seconds": times, "same_bits": same})
        print(
            f"{name:<9} deterministic {1e3 * times['deterministic']:8.1f} ms, "
            f"default {1e3 * times['default']:8.1f} ms = {times['deterministic'] / times['default']:.3f}; "
            f"two processes gave the same bits: deterministic {same['deterministic']}, default {same['default']}"
        )
    content = {
        "question": "cost and effect of run.deterministic",
        "device": device_name(torch.device("cuda")),
        "torch": torch.__version__,
        "layers": arguments.layers,
        "batch": arguments.batch,
        "passes": rows,
        "processes": processes,
    }
    (arguments.out / "deterministic.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
