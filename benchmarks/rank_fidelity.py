"""How well do cheap previews rank seeds, by tier and steps?

    python benchmarks/rank_fidelity.py --prompts 256 --seeds 96 --work FOLDER [--device cuda]
    python benchmarks/rank_fidelity.py examples/emoji/emoji.yaml --prompts 48 --seeds 96 --work FOLDER --out OUT

Samples whole pools with the production code, without Ray, of the testbed or of the model in the CONFIG files. Compares
every preview with the full sample (10 steps, float32) of the same seed, for the untrained policy. For videos, previews
decode the frames in `rollout.preview.latent_frames` and full samples all. The result is the table of Sol-RL's paper by
tier and steps, with the 4, 8 and 12 best and worst of each pool.

To continue an interrupted measurement, run the same command again: with the same `--work` and the same settings of
model, prompts, rewards, rollout and seed it reuses what it has sampled. If you rebuild a model at the same path, choose
another `--work`. If --prompts exceeds the held-out prompts, the first training prompts are added.

Prints the table and writes rank_fidelity_published.json to OUT (benchmarks/results without CONFIG and `--set`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import CONFIGS, RESULTS, embeddings, reported_errors, write

from solrl_ray import models, rewards
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.evaluation.student import student_quantile
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.quantization.scope import UNQUANTIZED_TIERS, quantize_
from solrl_ray.records import WorkUnit
from solrl_ray.rollout.rank_fidelity import rank_fidelity
from solrl_ray.rollout.sampler import Sampler

TIERS = ("float32", "bf16", "fp8", "nvfp4-emulated")
DTYPES = {"float32": "float32", "bf16": "bfloat16"}
"""Tier → dtype of the unquantised tiers; the others quantise the configured dtype."""
STEPS = (2, 4, 6, 8, 10)
SIDES = (4, 8, 12)
"""Numbers of seeds chosen at each end of the ranking."""


class Bench:
    """Rewards of pools of seeds for the first held-out prompts."""

    def __init__(self, config: Config, prompts: int, seeds: int, work: Path, device: str) -> None:
        """`work`: folder that keeps the sampled rewards."""
        self._config, self._seeds, self._work, self._device = config, seeds, work, device
        self._reward = rewards.load(config.rewards, device)
        parts, seen = config.prompts, config.model.references
        files = {"prompts.heldout": parts.heldout, "prompts.train": parts.train}
        self.some_frames = config.rollout.preview.latent_frames is not None
        known = [prompt for key, file in files.items() for prompt in read_prompts(file, key, seen=seen)]
        if len(known) < prompts:
            raise SystemExit(f"--prompts is {prompts}; it must be at most {len(known)}, the number of prompts.")
        self._prompts = known[:prompts]
        self._embeddings = embeddings(config.model, self._prompts)

    def pools(self, tier: str, steps: int, *, whole: bool = False) -> np.ndarray:
        """Rewards [prompts, seeds], read from their file or sampled and stored. `whole`: of all frames of a video."""
        sampled = self._config.model_dump_json(include={"model", "prompts", "rewards", "rollout"})
        of = [sampled, self._config.run.seed, tier, steps, len(self._prompts), self._seeds]
        of += [torch.__version__, self._device] + ["whole"] * whole
        file = self._work / f"{sha256(json.dumps(of).encode()).hexdigest()[:16]}.npy"
        if not file.exists():
            pools = self._sample(tier, steps, whole)
            self._work.mkdir(parents=True, exist_ok=True)
            np.save(file, pools)
        kept: np.ndarray = np.load(file)
        return kept

    def _sample(self, tier: str, steps: int, whole: bool) -> np.ndarray:
        section = self._config.model
        if tier in DTYPES:
            section = section.model_copy(update={"dtype": DTYPES[tier]})
        model = models.load(section, self._device, components={"transformer", "vae"})
        if tier not in UNQUANTIZED_TIERS:
            # On a CPU, FP8 uses reference arithmetic: the tier's numerics without its speed.
            quantize_(model.transformer, tier, section.quantization, without_kernels=self._device == "cpu")
        config = self._config.model_copy(update={"model": section})
        sampler = Sampler(config, model, self._reward, steps=steps, micro_batch=self._seeds)
        draw = sampler if whole else sampler.preview
        rows = []
        for prompt, embedding in zip(self._prompts, self._embeddings, strict=True):
            indices = tuple(range(self._seeds))
            unit = WorkUnit(stage="explore", iteration=0, revision=0, prompt_id=prompt.id, indices=indices)
            rows.append(draw(unit, prompt, embedding).rewards)
        return np.array(rows)


def compare(proxy: np.ndarray, full: np.ndarray, keep: int) -> dict[str, float]:
    """Rank fidelity of whole pools [prompts, seeds] with all full rewards known: means over prompts, some with the
    ends of their 95 % intervals.

    ``best_beats`` is the share of the pool's other seeds that a seed chosen as best, one of `keep` / 2, truly beats
    (ties count half; 0.5 by chance). ``worst_beats`` is the same for a seed chosen as worst.
    """
    rows = []
    for x, y in zip(proxy, full, strict=True):
        order, found = np.argsort(-x, kind="stable"), rank_fidelity([x], [y])
        beats = ((np.sign(y[:, None] - y[None, :]) + 1) / 2).sum(axis=1) - 0.5  # a seed ties with itself
        best, worst = (beats[chosen].mean() / (len(y) - 1) for chosen in (order[: keep // 2], order[-(keep // 2) :]))
        rows.append((found.spearman, found.kendall, float(best), float(worst)))
    figures = {}
    for name, values in zip(("spearman", "kendall", "best_beats", "worst_beats"), np.array(rows).T, strict=True):
        figures[name] = float(values.mean())
        if len(values) > 1:
            half = student_quantile(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
            figures |= {f"{name}_low": figures[name] - half, f"{name}_high": figures[name] + half}
    return figures


def measure(bench: Bench) -> list[dict[str, Any]]:
    """Print and return the fidelity by tier and steps. Ideally a chosen best seed beats nearly all others and a worst
    one nearly none.
    """
    full = bench.pools("float32", 10, whole=bench.some_frames)
    print("| tier | steps | Kendall | Spearman | best beat / worst beat, of 4 | of 8 | of 12 |")
    print("|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for tier, steps in itertools.product(TIERS, STEPS):
        proxies = bench.pools(tier, steps)
        by_side = {side: compare(proxies, full, 2 * side) for side in SIDES}
        one = by_side[SIDES[0]]
        names = ("spearman", "spearman_low", "spearman_high", "kendall", "kendall_low", "kendall_high")
        row: dict[str, Any] = {"tier": tier, "steps": steps} | {name: one[name] for name in names if name in one}
        for side, found in by_side.items():
            row |= {f"{name}_{side}": found[name] for name in ("best_beats", "worst_beats")}
        rows.append(row)
        sides = " | ".join(f"{f['best_beats']:.1%} / {f['worst_beats']:.1%}" for f in by_side.values())
        print(f"| {tier} | {steps} | {one['kendall']:.3f} | {one['spearman']:.3f} | {sides} |", flush=True)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="*", type=Path, metavar="CONFIG")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for solrl train")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("rank_fidelity"), help="folder that keeps sampled rewards")
    parser.add_argument("--out", type=Path, help="folder for the result")
    arguments = parser.parse_args(argv)
    if (arguments.config or arguments.set) and arguments.out is None:
        parser.error("CONFIG and --set need --out: benchmarks/results has the results without them")
    torch.set_num_threads(arguments.threads)
    config = load(arguments.config or [CONFIGS / "demo.yaml"], arguments.set)
    bench = Bench(config, arguments.prompts, arguments.seeds, arguments.work, arguments.device)
    content = {"prompts": arguments.prompts, "seeds": arguments.seeds}
    content["device"] = torch.cuda.get_device_name() if arguments.device != "cpu" else "CPU"
    content |= {"model": config.model.path, "policies": ["base"], "torch": torch.__version__}
    write((arguments.out or RESULTS) / "rank_fidelity_published.json", content | {"previews": measure(bench)})


if __name__ == "__main__":
    with reported_errors():
        main()
