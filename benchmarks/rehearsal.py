"""Time and memory of a whole real run, phase by phase: from the command to the LoRA in a stock pipeline.

    python benchmarks/rehearsal.py flux [--only STAGE] [--seconds 580] [--work FOLDER] [--out FOLDER] [--set a.b=c]
    python benchmarks/rehearsal.py flux --tiny --work /tmp/rehearsal --out /tmp    # on a CPU: only tests the script

The checkpoint and the reward network have their published sizes and random weights (`full_size.py`). The run uses a
shipped configuration, such as configs/runs/flux1_dev_80gb.yaml, but with 2 prompts per iteration, 8 of 48 seeds with
pruned previews, and the testbed's prompts. Stages, each in a process of at most `--seconds`:

    make     writes missing checkpoints
    cold     a run of one iteration with an empty compile cache
    warm     a run of `--iterations` with the cache written by `cold`, and 64 held-out prompts before and after
    draw     loads the LoRA of `warm` into the stock diffusers pipeline and generates one image

Writes rehearsal_MODEL.json after each stage and keeps earlier results of the other stages.

    phases                        seconds by name. Those of `warm` add up to the seconds of its command: each moment has
                                  one phase, the first in `phases.ORDER` if several workers are active, or `rest` if
                                  none is (in a rollout: no unit is running). Loading and compiling have a resolution
                                  of 0.5 s.
    first_exploring_cold, _warm   seconds from the command to the start of the first preview, without evaluations
                                  before it
    memory_gb                     peak GPU memory of each phase (nvidia-smi, twice per second)

Files are read from the page cache, as `make` has just written them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import full_size
import torch
import transformers
from common import CONFIGS, PROMPTS, STOP_SECONDS, gpus, options, parsed, run_until, write
from phases import first_exploring, owned, peaks, phases, read_spans
from watches import Watch

from solrl_ray import models
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.models.stock_call import StockCall
from solrl_ray.prompts.prompt_set import read_prompts

RUNS = {
    "flux": "flux1_dev_80gb.yaml",
    "sd3": "sd35_large_80gb.yaml",
    "sd3_medium": "sd35_medium_80gb.yaml",
    "sana": "sana_1600m_80gb.yaml",
    "qwen_image": "qwen_image_141gb.yaml",
    "z_image": "z_image_80gb.yaml",
}
REWARD = "pickscore"
"""Reward of these configurations."""
PARTS = ("make", "cold", "warm", "draw")
HELD_OUT = 64


# The result


def merged(parts: dict[str, Any]) -> dict[str, Any]:
    """Results of all stages as one table: phases of `warm` under their names, those of `cold` with a suffix."""
    found: dict[str, float] = {}
    found |= parts.get("make", {}).get("phases", {})
    found |= {f"{name}, cold": seconds for name, seconds in parts.get("cold", {}).get("phases", {}).items()}
    found |= parts.get("warm", {}).get("phases", {})
    found |= parts.get("draw", {}).get("phases", {})
    table: dict[str, Any] = {"phases": found}
    table |= {f"first_exploring_{run}": parts.get(run, {}).get("first_exploring") for run in ("cold", "warm")}
    runs = [parts[run] for run in ("cold", "warm") if run in parts]
    table["peak_gb"] = max((run["peak_gb"] for run in runs), default=None)
    return table


class Stopwatch:
    """Measures seconds and peak GPU memory of this process, by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._memory: dict[str, float] = {}

    def __call__(self, phase: str, work: Callable[[], Any]) -> Any:
        if gpus():
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        result = work()
        if gpus():
            torch.cuda.synchronize()
            self._memory[phase] = round(torch.cuda.max_memory_reserved() / 1e9, 1)
        self.seconds[phase] = round(time.perf_counter() - began, 3)
        return result

    def measured(self) -> dict[str, Any]:
        return {"phases": self.seconds, "memory_gb": self._memory}


# The stages


def make(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"phases": {}, "gb": {}}
    size = full_size.Size(layers=arguments.layers, text_layers=arguments.layers, tiny=arguments.tiny)
    for name in (arguments.model, REWARD):
        folder, began = arguments.work / name, time.perf_counter()
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            if name == REWARD:
                written = full_size.write_reward(name, folder, size)
            else:
                written = full_size.write_pipeline(full_size.PIPELINES[name](size), folder)
            (folder / "made").touch()
            found["gb"][name] = round(written / 1e9, 1)
            found["phases"][f"making {name}"] = round(time.perf_counter() - began, 3)
    return found


def run(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """`solrl train` as a user starts it, until it ends or `--seconds` have passed."""
    folder = run_folder(arguments, name)
    for old in (folder, *([arguments.work / "compiled"] if name == "cold" else ())):
        shutil.rmtree(old, ignore_errors=True)
    command: list[str | Path] = [sys.executable, "-m", "solrl_ray", "train", "--no-live"]
    command.append(CONFIGS / "runs" / RUNS[arguments.model])
    for setting in settings(arguments, name):
        command += ["--set", setting]
    watch = Watch()
    watch.start()
    began = time.time()
    status = run_until(command, arguments.seconds)
    ended = time.time()
    watch.stop()
    spans = read_spans(folder)
    samples = [(at, memory) for at, _, _, memory in watch.seen]
    found: dict[str, Any] = {
        "seconds": round(ended - began, 3),
        "status": "stopped at --seconds" if status is None else status,
        "phases": phases(spans, began, ended),
        "memory_gb": {phase: round(gb, 1) for phase, gb in peaks(samples, owned(spans, began, ended)).items()},
        "first_exploring": first_exploring(spans, began),
        "peak_gb": max(watch.peaks(), default=0.0),
        "iterations": iterations(folder),
    }
    if found["iterations"]:  # in the last one
        began = [span.started for span in spans if span.stage == "rollout"][-1]
        found["busy"] = watch.busy(began, began + found["iterations"][-1]["total"])
    return found


def iterations(folder: Path) -> list[dict[str, float]]:
    """Seconds of each iteration by stage; `fixed` is the time outside rollout and update."""
    file = folder / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    rollouts = {span.iteration: span.seconds for span in read_spans(folder) if span.stage == "rollout"}
    found = []
    for record in records:
        if record["event"] == "iteration":
            seconds, update = record["seconds"], record["busy_seconds"]["learn"]
            rollout = rollouts.get(record["iteration"], 0.0)
            fixed = seconds["total"] - rollout - update
            kept = {"rollout": rollout, "update": update, "fixed": fixed, **seconds}
            found.append({stage: round(value, 2) for stage, value in kept.items()})
    return found


def draw(arguments: argparse.Namespace) -> dict[str, Any]:
    """Generate an image with the stock pipeline with the run's LoRA, and one without, on the run's noise levels with
    Euler steps.
    """
    config = configuration(arguments, "draw")
    drawing = StockCall.of(config)
    watch, kind = Stopwatch(), models.family(config.model).PIPELINE
    stock = watch(
        "stock pipeline: files",
        lambda: kind.from_pretrained(arguments.work / arguments.model, torch_dtype=torch.bfloat16),
    )
    watch("stock pipeline: moving", lambda: stock.to("cuda" if gpus() else "cpu"))
    stock.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**drawing.scheduler)
    prompt = read_prompts(config.prompts.heldout)[0].text
    call = drawing.call | {"output_type": "pt"}

    def picture() -> Any:
        return stock(prompt, generator=torch.Generator().manual_seed(0), **call).images[0].float()

    plain = watch("stock pipeline: a picture without LoRA", picture)
    watch("stock pipeline: load_lora_weights", lambda: stock.load_lora_weights(run_folder(arguments, "warm") / "lora"))
    tuned = watch("stock pipeline: a picture with LoRA", picture)
    return watch.measured() | {"largest_change_of_a_pixel": round(float((plain - tuned).abs().max()), 6)}


# Settings


def run_folder(arguments: argparse.Namespace, name: str) -> Path:
    folder: Path = arguments.work / "runs" / f"{arguments.model}_{name}"
    return folder


def settings(arguments: argparse.Namespace, name: str) -> list[str]:
    """Settings on top of the shipped configuration: paths, fewer prompts and seeds, and the length of the run."""
    full = name == "warm"
    held_out = (8 if arguments.tiny else HELD_OUT) if full else 1
    steps = [] if full and not arguments.tiny else ["evaluation.steps=2"]
    return [
        f"model.path='{arguments.work / arguments.model}'",
        f"rewards=[{{kind: {REWARD}, path: '{arguments.work / REWARD}'}}]",
        PROMPTS,
        f"run={{name: {arguments.model}_{name}, root: '{arguments.work / 'runs'}'}}",
        f"run.iterations={arguments.iterations if full else 1}",
        "rollout={prompts: 2, pool: 48, keep: 8}",
        "rollout.preview={prune: {after: 2, keep: 24}}",
        "rollout.regenerate.micro_batch=8",
        f"learner={{micro_batch: {arguments.micro_batch}, updates: 1}}",
        f"evaluation={{every: 0, prompts: {held_out}, samples: 1, pictures: {min(held_out, 8)}}}",
        *steps,
        f"compile.cache='{arguments.work / 'compiled'}'",
        *(tiny_settings() if arguments.tiny else ()),
        *arguments.set,
    ]


def tiny_settings() -> list[str]:
    """Settings for small widths and images, a machine without a GPU, and a visible effect of three updates."""
    roles = ("explorers", "regenerators", "learners")
    return [
        *(f"fleet.{role}.{key}=0" for role in roles for key in ("num_gpus", "num_cpus")),
        "model.resolution=64",
        "model.quantization.min_features=8",
        "rollout.explore.precision=nvfp4-emulated",
        "learner.optimizer.lr=0.03",
    ]


def configuration(arguments: argparse.Namespace, name: str) -> Config:
    config = load([CONFIGS / "runs" / RUNS[arguments.model]], settings(arguments, name))
    if config.model.references:
        raise SystemExit(
            f"model.references is {config.model.references} (--set), but the rehearsal has no images; leave it out."
        )
    return config


# The command


def conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if gpus() else "CPU",
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            **{library.__name__: library.__version__ for library in (torch, diffusers, transformers)},
        },
        "configuration": RUNS[arguments.model],
        "set": settings(arguments, "warm"),
        "tiny": arguments.tiny,
    }


def add(arguments: argparse.Namespace, part: str, found: dict[str, Any]) -> dict[str, Any]:
    """Add a stage's result to the file; returns the file's content."""
    file: Path = arguments.out / f"rehearsal_{arguments.model}.json"
    parts = json.loads(file.read_text())["parts"] if file.exists() else {}
    if parts.get("tiny") != arguments.tiny:  # measured with other networks
        parts = {}
    parts |= {"tiny": arguments.tiny, part: found}
    content = {"model": arguments.model, **merged(parts), "conditions": conditions(arguments), "parts": parts}
    write(file, content)
    return content


def table(found: dict[str, Any]) -> str:
    """Table of phases with seconds and peak GPU memory."""
    parts = found["parts"]
    memory = {f"{phase}, cold": gb for phase, gb in parts.get("cold", {}).get("memory_gb", {}).items()}
    for part in ("warm", "draw"):
        memory |= parts.get(part, {}).get("memory_gb", {})
    lines = [f"{'phase':<42}{'seconds':>9}{'GPU, GB':>10}"]
    for phase, seconds in found["phases"].items():
        lines.append(f"{phase:<42}{seconds:9.2f}{memory.get(phase, ''):>10}")
    for number, stages in enumerate(parts.get("warm", {}).get("iterations", ())):
        lines.append(f"iteration {number}: " + "  ".join(f"{stage} {value:.2f}" for stage, value in stages.items()))
    keys = ("first_exploring_cold", "first_exploring_warm", "peak_gb")
    return "\n".join([*lines, *(f"{key}: {found[key]}" for key in keys)])


def one_part(arguments: argparse.Namespace, part: str) -> None:
    found = run(arguments, part) if part in ("cold", "warm") else {"make": make, "draw": draw}[part](arguments)
    print(table(add(arguments, part, found)), flush=True)
    if found.get("status"):
        raise SystemExit(f"the {part} run of {arguments.model} ended with: {found['status']}")


def each_part(arguments: argparse.Namespace, argv: Sequence[str]) -> None:
    """Run all stages; with a GPU each in a separate process, so that its GPU memory is freed."""
    for part in PARTS:
        if not gpus():
            one_part(arguments, part)
            continue
        command = [sys.executable, __file__, *argv, "--only", part]
        try:
            subprocess.run(command, check=True, timeout=arguments.seconds + 2 * STOP_SECONDS)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise SystemExit(f"stage {part} of {arguments.model} failed: {error}") from None


def main(argv: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=RUNS)
    parser.add_argument("--only", choices=PARTS, help="run one stage; default: all of them")
    parser.add_argument("--seconds", type=float, default=580.0, help="limit per stage")
    parser.add_argument("--iterations", type=int, default=3, help="of the warm run")
    parser.add_argument("--micro-batch", type=int, default=4, help="of the learner; an update has 16 samples")
    parser.add_argument("--tiny", action="store_true", help="small networks, for a CPU")
    options(parser)
    arguments = parsed(parser, given)
    configuration(arguments, "warm")  # fails early for settings that no stage supports
    if arguments.only:
        one_part(arguments, arguments.only)
    else:
        each_part(arguments, given)


if __name__ == "__main__":
    main()
