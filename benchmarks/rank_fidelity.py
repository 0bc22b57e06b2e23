"""How well do cheap previews rank, by tier and steps, and with a pool whose middle is dropped?

    python benchmarks/rank_fidelity.py published --prompts 256 --seeds 96 --work FOLDER [--device cuda]
    python benchmarks/rank_fidelity.py pruned --prompts 32 --seeds 96 --keep 24 --work FOLDER

Samples whole pools of the testbed on the production path, without Ray: every preview against the full sample (10 steps,
float32) of the same seeds, with `configs/demo.yaml` and the untrained policy. `published` is the table of Sol-RL's
paper by tier and steps, with the 4, 8 and 12 best and worst of each pool. `pruned` is by tier, `after`, `keep` and unit
(`pruned_previews.py`), most of an hour on one core. Given again with the same `--work`, either goes on where it was.
Prompts beyond the held-out ones are the first of those that are trained on.

Prints the table; writes rank_fidelity_published.json or rank_fidelity_pruned.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import CONFIGS, RESULTS, write
from pruned_previews import figures, print_table

from solrl_ray import models, rewards
from solrl_ray.config.loading import load
from solrl_ray.config.previews import Prune
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import PoolSampling
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.quantization.scope import UNQUANTIZED_TIERS, quantize_
from solrl_ray.records import PromptEmbedding, Pruning, WorkUnit
from solrl_ray.rollout.audit import AuditedPool, audit
from solrl_ray.rollout.pruning import survivors
from solrl_ray.rollout.sampler import Sampler

TIERS = ("float32", "bf16", "fp8", "nvfp4-emulated")
STEPS = (2, 4, 6, 8, 10)
SIDES = (4, 8, 12)
"""Seeds chosen of each end, in the published table."""
MICRO_BATCH = 12
"""Of pruned previews: 36 and 48 seeds fill whole ones."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to preview."""

    tier: str
    steps: int = 6
    micro_batch: int = 0
    """0: the whole pool."""
    unit: int = 0
    """Seeds that are pruned together; 0: the whole pool."""
    after: int = 0
    keep: int = 0
    """Of the whole pool; 0: it is not pruned."""


@dataclass(frozen=True)
class Pools:
    """What previews say of pools of seeds, all [prompts, seeds]."""

    proxies: np.ndarray
    """Of a seed that was dropped its early score."""
    finished: np.ndarray
    """Whether a seed was not dropped."""


class Bench:
    """Rewards of pools of seeds on the first held-out prompts."""

    def __init__(self, config: Config, prompts: int, seeds: int, work: Path, device: str) -> None:
        """`work`: folder in which what was sampled is kept."""
        self._config, self._seeds, self._work, self._device = config, seeds, work, device
        self._reward = rewards.load(config.rewards, device)
        known = [*read_prompts(config.prompts.heldout), *read_prompts(config.prompts.train)]
        if len(known) < prompts:
            raise SystemExit(f"--prompts is {prompts}; it must be at most {len(known)}, the prompts that there are.")
        self._prompts = known[:prompts]
        encoded = models.load(config.model, "cpu").encode([prompt.text for prompt in self._prompts])
        self._embeddings = [
            PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest="")
            for prompt, tensors in zip(self._prompts, encoded, strict=True)
        ]

    def pools(self, case: Case) -> Pools:
        """As kept in a file, or sampled and kept."""
        of = [asdict(case), len(self._prompts), self._seeds, torch.__version__, self._device]
        file = self._work / f"{sha256(json.dumps(of).encode()).hexdigest()[:16]}.npz"
        if not file.exists():
            pools = self._sample(case)
            self._work.mkdir(parents=True, exist_ok=True)
            np.savez(file, proxies=pools.proxies, finished=pools.finished)
        kept = np.load(file)
        return Pools(kept["proxies"], kept["finished"])

    def _sample(self, case: Case) -> Pools:
        section = self._config.model
        if case.tier == "bf16":
            section = section.model_copy(update={"dtype": "bfloat16"})
        model = models.load(section, self._device, components={"transformer", "vae"})
        if case.tier not in UNQUANTIZED_TIERS:
            # FP8 of a CPU is its reference arithmetic: the numbers of the tier, not its speed.
            quantize_(model.transformer, case.tier, section.quantization, without_kernels=self._device == "cpu")
        config = self._config.model_copy(update={"model": section})
        sampler = Sampler(config, model, self._reward, steps=case.steps, micro_batch=case.micro_batch or self._seeds)
        size = case.unit or self._seeds
        prune = Pruning(after=case.after, keep=case.keep * size // self._seeds) if case.keep else None
        proxies = np.zeros((len(self._prompts), self._seeds))
        finished = np.full(proxies.shape, prune is None)
        for row, (prompt, embedding) in enumerate(zip(self._prompts, self._embeddings, strict=True)):
            for first in range(0, self._seeds, size):
                indices = tuple(range(first, first + size))
                unit = WorkUnit(
                    stage="explore", iteration=0, revision=0, prompt_id=prompt.id, indices=indices, prune=prune
                )
                previewed = sampler.preview(unit, prompt, embedding)
                proxies[row, first : first + size] = previewed.rewards.tolist()
                if prune:
                    finished[row, [first + i for i in survivors(previewed.early.tolist(), prune.keep)]] = True
        return Pools(proxies, finished)


def compare(proxy: np.ndarray, full: np.ndarray, keep: int) -> dict[str, float]:
    """Fidelity of whole pools [prompts, seeds], all of whose full rewards are known."""
    pools = []
    for x, y in zip(proxy, full, strict=True):
        order = np.argsort(-x, kind="stable").tolist()
        chosen, others = (*order[: keep // 2], *order[-(keep // 2) :]), tuple(order[keep // 2 : -(keep // 2)])
        pools.append(
            AuditedPool(
                proxies=tuple(x.tolist()),
                chosen=chosen,
                chosen_rewards=tuple(y[list(chosen)].tolist()),
                audited=others,
                audited_rewards=tuple(y[list(others)].tolist()),
            )
        )
    return audit(pools)


def measure_published(bench: Bench) -> list[dict[str, Any]]:
    """By tier and steps; a seed chosen as one of the `k` best or worst should beat nearly all, or nearly none."""
    full = bench.pools(Case(tier="float32", steps=10)).proxies
    print("| tier | steps | Kendall | Spearman | best beat / worst beat, of 4 | of 8 | of 12 |")
    print("|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for tier, steps in itertools.product(TIERS, STEPS):
        proxies = bench.pools(Case(tier=tier, steps=steps)).proxies
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


def measure_pruned(bench: Bench, seeds: int, keep: int) -> list[dict[str, Any]]:
    """Pruned previews beside those of the same tier that are all finished."""
    full = bench.pools(Case(tier="float32", steps=10, micro_batch=MICRO_BATCH)).proxies
    rows: list[dict[str, Any]] = []
    for tier in ("float32", "nvfp4-emulated"):
        plain = Case(tier=tier, micro_batch=MICRO_BATCH)
        whole = bench.pools(plain)
        rows.append(of_pruned(plain, whole, whole, full, keep))
        for after, share, units in itertools.product((1, 2, 3), (0.375, 0.5), (1, 2)):
            case = replace(plain, after=after, keep=round(share * seeds), unit=seeds // units)
            rows.append(of_pruned(case, bench.pools(case), whole, full, keep))
    print_table(rows)
    return rows


def of_pruned(case: Case, pools: Pools, whole: Pools, full: np.ndarray, keep: int) -> dict[str, Any]:
    size = full.shape[1]
    sampling = PoolSampling(
        tier=case.tier,
        steps=case.steps,
        micro_batch=case.micro_batch,
        pool=size,
        unit=case.unit or size,
        prune=Prune(after=case.after, keep=case.keep) if case.keep else None,
    )
    return {
        "tier": case.tier,
        "preview": f"after {case.after} keep {case.keep}" if case.keep else "all finished",
        "unit": sampling.unit,
        "steps": sampling.units * sampling.forwards * case.micro_batch / (size * case.steps),
        "decoded": sampling.units * sampling.decodings * case.micro_batch / size,
        **figures(pools.proxies, pools.finished, whole.proxies, full, keep),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("published", "pruned"))
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--keep", type=int, default=8, help="seeds chosen of each pool, in the table `pruned`")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("rank_fidelity"), help="folder of what was sampled")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = load([CONFIGS / "demo.yaml"])
    bench = Bench(config, arguments.prompts, arguments.seeds, arguments.work, arguments.device)
    published = arguments.table == "published"
    rows = measure_published(bench) if published else measure_pruned(bench, arguments.seeds, arguments.keep)
    content = {key: getattr(arguments, key) for key in ("prompts", "seeds", "keep")}
    content["device"] = torch.cuda.get_device_name() if arguments.device != "cpu" else "CPU"
    content |= {"model": config.model.path, "policies": ["base"], "torch": torch.__version__, "previews": rows}
    write(arguments.out / f"rank_fidelity_{arguments.table}.json", content)


if __name__ == "__main__":
    main()
