"""One run of the whole loop at a published architecture's size, with random weights, on the GPU of this machine.

    python benchmarks/full_iteration.py flux --prompts 2 --iterations 3 [--tier fp8] [--out FOLDER] [--work FOLDER]

Writes the checkpoint (`full_size.py`), then trains through the command line: explorer, regenerator and learner are one
process. Per prompt everything has the published shape (96 seeds, 24 kept, 6 and 10 steps, the model's resolution,
LoRA and micro-batches); there are fewer prompts in an iteration than the published 48, so that it takes minutes. All
previews are finished, unless `--set "rollout.preview.prune={after: 2, keep: 36}"` is given. The first iteration
contains the compilation of every block. Rewards of random weights mean nothing and are not shown.

Prints a table; writes full_iteration_NAME.json into FOLDER (default benchmarks/results); the run's name is MODEL, or
what `--name` says.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "configs"
MODELS = {
    "flux": "flux1_dev.yaml",
    "sd3": "sd35_large.yaml",
    "sd3_medium": "sd35_medium.yaml",
    "sana": "sana_1600m.yaml",
    "qwen_image": "qwen_image.yaml",
    "z_image": "z_image.yaml",
}
STAGES = ("explore", "regenerate", "learn", "publish", "checkpoint", "total")


class MemoryWatch(threading.Thread):
    """Peak of the GPU's used memory, polled: the three workers are processes of their own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.5):
            free, total = torch.cuda.mem_get_info()
            self.peak = max(self.peak, total - free)

    def stop(self) -> float:
        """GB."""
        self._done.set()
        return self.peak / 1e9


def make(model: str, work: Path, layers: int | None) -> None:
    for name in (model, "clip"):
        if not (work / name).exists():
            depth = ["--layers", str(layers)] if layers and name != "clip" else []
            subprocess.run([sys.executable, HERE / "full_size.py", name, work / name, *depth], check=True)


def settings(arguments: argparse.Namespace) -> list[str]:
    """What is not published: where things are, how few prompts, and who gets how much of the GPU."""
    gpu = "num_gpus: 1, " if torch.cuda.is_available() else ""
    work: Path = arguments.work
    return [
        f"model.path='{work / arguments.model}'",
        f"rewards=[{{kind: clipscore, path: '{work / 'clip'}'}}]",
        "prompts={train: builtin:testbed/prompts/train.txt, heldout: builtin:testbed/prompts/heldout.txt}",
        f"run={{name: {arguments.name}, root: '{work / 'runs'}', iterations: {arguments.iterations}}}",
        f"rollout.prompts={arguments.prompts}",
        f"rollout.explore.precision={arguments.tier}",
        "rollout.preview.prune=null",
        "fleet.placement=colocated",
        f"fleet.explorers={{count: 1, {gpu}threads: 4}}",
        f"fleet.regenerators={{count: 1, {gpu}threads: 4}}",
        f"fleet.learners={{{gpu}threads: 4}}",
        "fleet.deadlines={start: 600, explore: 600, regenerate: 600}",
        "evaluation={prompts: 1, samples: 1, steps: 2, pictures: 0}",
        *arguments.set,
    ]


def train(arguments: argparse.Namespace) -> float:
    command: list[str | Path] = [sys.executable, "-m", "solrl_ray", "train", "--no-live"]
    command += [CONFIGS / "methods/sol_rl.yaml", CONFIGS / "models" / MODELS[arguments.model], *arguments.parts]
    for setting in settings(arguments):
        command += ["--set", setting]
    watch = MemoryWatch()
    if torch.cuda.is_available():
        watch.start()
    subprocess.run(command, check=True)
    return watch.stop()


def collect(arguments: argparse.Namespace, peak: float) -> dict[str, Any]:
    run: Path = arguments.work / "runs" / arguments.name
    iterations = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    iterations = [entry for entry in iterations if "seconds" in entry and "gradient_norm" in entry]
    return {
        "model": arguments.model,
        "tier": arguments.tier,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "layers": arguments.layers or "published",
        "prompts": arguments.prompts,
        "peak_memory_gb": peak,
        "iterations": [
            {
                "seconds": entry["seconds"],
                "busy_seconds": entry.get("busy_seconds", {}),
                "weights_wait": entry["weights_wait"],
            }
            for entry in iterations
        ],
        "attestations": json.loads((run / "attestations.json").read_text()),
        "summary": json.loads((run / "summary.json").read_text()),
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['model']}, {result['prompts']} prompts an iteration, previews in {result['tier']}, "
        f"{result['gpu']}, peak {result['peak_memory_gb']:.1f} GB; seconds:",
        "iteration  " + "  ".join(f"{stage:>10}" for stage in STAGES) + "   explorers wait for weights",
    ]
    for number, entry in enumerate(result["iterations"]):
        row = "  ".join(f"{entry['seconds'].get(stage, 0.0):10.1f}" for stage in STAGES)
        lines.append(f"{number:9d}  {row}   {100 * entry['weights_wait']:.1f} %")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--tier", default="fp8")
    parser.add_argument("--layers", type=int, help="transformer blocks of each kind, for a try on a small machine")
    parser.add_argument("--set", action="append", default=[], help="as for solrl train")
    parser.add_argument("--parts", nargs="+", type=Path, default=[], help="further files of configs/")
    parser.add_argument("--work", type=Path, default=Path("full_size"), help="checkpoints and run folders")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--name", help="of the run; default: the model")
    arguments = parser.parse_args(argv)
    arguments.name = arguments.name or arguments.model
    arguments.work = arguments.work.absolute()
    began = time.perf_counter()
    make(arguments.model, arguments.work, arguments.layers)
    print(f"checkpoints: {time.perf_counter() - began:.0f} s", flush=True)
    result = collect(arguments, train(arguments))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"full_iteration_{arguments.name}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
