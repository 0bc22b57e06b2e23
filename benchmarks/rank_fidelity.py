"""How well do cheap previews rank, by tier, steps, solver, layers left unquantised, and age of the policy?

    python benchmarks/rank_fidelity.py [--prompts 6] [--seeds 24] [--run runs/demo] [--only sync]
    python benchmarks/rank_fidelity.py --only pruned --prompts 32 --seeds 96 --keep 24 --work FOLDER
    python benchmarks/rank_fidelity.py --only published --prompts 256 --seeds 96 --work FOLDER [--device cuda]

Samples whole pools of the testbed on the production path, without Ray: every preview against the full sample (10
steps, float32, the solver of the preview) of the same seeds, with `configs/demo.yaml`. `--run` is a finished run's
folder: policies are then its last two checkpoints, and a stale preview is one by the older of them, beside the full
sample of the newer. Sync modes are measured by what an explorer holds that was sent the newest policy so.

``--only pruned`` is a table of its own, by tier, `after`, `keep` and unit (`pruned_previews.py`). It takes most of an
hour on one core: given again with the same ``--work``, it goes on where it was. So does ``--only published``, the table
of Sol-RL's paper by tier and steps, with the 4, 8 and 12 best and worst of each pool. Prompts beyond the held-out ones
are the first of those that are trained on.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from pruned_previews import figures, print_table
from torch import nn

from solrl_ray import models, rewards
from solrl_ray.config.loading import load
from solrl_ray.config.previews import Prune
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import PoolSampling
from solrl_ray.learning.state import LearnerState
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.quantization.scope import UNQUANTIZED_TIERS, quantize_
from solrl_ray.records import PromptEmbedding, Pruning, WorkUnit
from solrl_ray.rollout.audit import AuditedPool, audit
from solrl_ray.rollout.pruning import survivors
from solrl_ray.rollout.sampler import Sampler
from solrl_ray.weight_sync import payload
from solrl_ray.weight_sync.publication import EXPLORER, Publication
from solrl_ray.weight_sync.publish import Publisher, merge_module, touched_linears
from solrl_ray.weight_sync.receive import Receiver, bases_to_keep

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
TIERS = ("float32", "bf16", "fp8", "nvfp4-emulated")
STEPS = (2, 3, 4, 6, 8, 10)
PUBLISHED_STEPS = (2, 4, 6, 8, 10)
SIDES = (4, 8, 12)
"""Seeds chosen of each end, in the published table."""
MICRO_BATCH = 12
"""Of pruned previews: 36 and 48 seeds fill whole ones."""
SKIPPED = {
    "query and key as well": ["to_q", "to_k", "add_q_proj", "add_k_proj"],
    "the text stream as well": [".add_", "to_add_out", "ff_context"],
    "attention as well": ["attn"],
}
"""Layers left unquantised beside those of the configuration."""
Factors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to preview."""

    group: str
    name: str
    tier: str = "nvfp4-emulated"
    steps: int = 6
    solver: str = "dpm2"
    skip: tuple[str, ...] = ()
    stale: bool = False
    sync: str = ""
    """The mode of publishing by which the policy comes; empty: merged before the model is quantised."""
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


def cases(policies: int) -> Iterator[Case]:
    for tier in TIERS:
        yield Case(group="tier", name=tier, tier=tier)
    for steps in STEPS:
        yield Case(group="steps", name=f"{steps} steps", steps=steps)
    for solver in ("euler", "dpm2"):
        yield Case(group="solver", name=solver, solver=solver)
    yield Case(group="unquantised", name="as configured")
    for name, skip in SKIPPED.items():
        yield Case(group="unquantised", name=name, skip=tuple(skip))
    if policies > 1:
        yield Case(group="staleness", name="the same policy")
        yield Case(group="staleness", name="one update older", stale=True)
    if policies:
        yield Case(group="sync", name="merged, then quantised")
        for mode in ("packed", "lora"):
            yield Case(group="sync", name=mode, sync=mode)


class Bench:
    """Rewards of pools of seeds on the first held-out prompts."""

    def __init__(
        self,
        config: Config,
        prompts: int,
        seeds: int,
        policies: list[Factors],
        work: Path | None = None,
        device: str = "cpu",
    ) -> None:
        """`work`: folder in which what was sampled is kept."""
        self._config, self._seeds, self._work, self._device = config, seeds, work, device
        self._policies = [{name: tensor.to(device) for name, tensor in factors.items()} for factors in policies]
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
        self._known: dict[Case, Pools] = {}

    def pool(self, case: Case) -> np.ndarray:
        """Rewards [prompts, seeds] of previews that are not pruned."""
        return self.pools(case).proxies

    def pools(self, case: Case) -> Pools:
        key = replace(case, group="", name="")
        if key not in self._known:
            self._known[key] = self._stored(key) if self._work else self._sample(key)
        return self._known[key]

    def _stored(self, case: Case) -> Pools:
        """As kept in a file, or sampled and kept."""
        assert self._work is not None
        of = [asdict(case), len(self._prompts), self._seeds, len(self._policies), torch.__version__]
        of += [self._device] if self._device != "cpu" else []
        file = self._work / f"{sha256(json.dumps(of).encode()).hexdigest()[:16]}.npz"
        if not file.exists():
            pools = self._sample(case)
            self._work.mkdir(parents=True, exist_ok=True)
            np.savez(file, proxies=pools.proxies, finished=pools.finished)
        kept = np.load(file)
        return Pools(kept["proxies"], kept["finished"])

    def _sample(self, case: Case) -> Pools:
        model_section = self._config.model
        if case.tier == "bf16":
            model_section = model_section.model_copy(update={"dtype": "bfloat16"})
        model = models.load(model_section, self._device, components={"transformer", "vae"})
        if self._policies and not case.sync:
            factors = self._policies[0 if case.stale else -1]
            lora = model_section.lora
            for module, linear in touched_linears(model.transformer, lora.targets).items():
                linear.weight.data = merge_module(linear.weight.data, module, factors, lora.alpha / lora.rank)
        if case.sync:
            self._receive(model.transformer, case.sync)
        elif case.tier not in UNQUANTIZED_TIERS:
            scope = model_section.quantization
            scope = scope.model_copy(update={"skip": [*scope.skip, *case.skip]})
            # FP8 of a CPU is its reference arithmetic: the numbers of the tier, not its speed.
            quantize_(model.transformer, case.tier, scope, without_kernels=self._device == "cpu")
        rollout = self._config.rollout.model_copy(update={"solver": case.solver})
        config = self._config.model_copy(update={"rollout": rollout, "model": model_section})
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

    def _receive(self, transformer: nn.Module, mode: str) -> None:
        """Make an explorer's transformer of the base, and have it take the newest policy as it is published."""
        publish = self._config.publish.model_copy(update={"mode": mode})
        config = self._config.model_copy(update={"publish": publish})
        revision = Publisher.for_model(copy.deepcopy(transformer), config).build(1, self._policies[-1])
        kept = bases_to_keep(transformer, config, torch.device(self._device))
        quantize_(transformer, config.rollout.explore.precision, config.model.quantization)
        content = Publication(revision=revision, mode=mode).payload(EXPLORER)
        Receiver(transformer, quantized_base=kept).apply(payload.read(content))


def compare(proxy: np.ndarray, full: np.ndarray, keep: int) -> dict[str, float]:
    """Fidelity of whole pools [prompts, seeds], all of whose full rewards are known."""
    pools, overlap = [], []
    for x, y in zip(proxy, full, strict=True):
        order, truth = (np.argsort(-values, kind="stable").tolist() for values in (x, y))
        half = keep // 2
        chosen, others = (*order[:half], *order[-half:]), tuple(order[half:-half])
        pools.append(
            AuditedPool(
                proxies=tuple(x.tolist()),
                chosen=chosen,
                chosen_rewards=tuple(y[list(chosen)].tolist()),
                audited=others,
                audited_rewards=tuple(y[list(others)].tolist()),
            )
        )
        same = len(set(order[:half]) & set(truth[:half])) + len(set(order[-half:]) & set(truth[-half:]))
        overlap.append(same / keep)
    figures = audit(pools)
    return figures | {"overlap": float(np.mean(overlap)), "spread": float(full.std(axis=1).mean())}


def measure(bench: Bench, policies: int, keep: int, only: str = "") -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    print("| varied | preview | Spearman | Kendall | overlap | best beat | worst beat | regret |")
    print("|---|---|---|---|---|---|---|---|")
    for case in (case for case in cases(policies) if only in ("", case.group)):
        full = bench.pool(Case(group="", name="", tier="float32", steps=10, solver=case.solver))
        found = compare(bench.pool(case), full, keep)
        rows.append({"group": case.group, "preview": case.name, **found})
        half = f" ± {found['spearman_high'] - found['spearman']:.3f}" if "spearman_high" in found else ""
        print(
            f"| {case.group} | {case.name} | {found['spearman']:.3f}{half} | {found['kendall']:.3f} "
            f"| {found['overlap']:.3f} | {found['best_beats']:.3f} | {found['worst_beats']:.3f} "
            f"| {found['regret']:.4f} |",
            flush=True,
        )
    return rows


def measure_published(bench: Bench) -> list[dict[str, object]]:
    """By tier and steps; a seed chosen as one of the `k` best or worst should beat nearly all, or nearly none."""
    full = bench.pool(Case(group="", name="", tier="float32", steps=10))
    print("| tier | steps | Kendall | Spearman | best beat / worst beat, of 4 | of 8 | of 12 | overlap, of 12 |")
    print("|---|---|---|---|---|---|---|---|")
    rows: list[dict[str, object]] = []
    for tier, steps in itertools.product(TIERS, PUBLISHED_STEPS):
        proxies = bench.pool(Case(group="published", name="", tier=tier, steps=steps))
        by_side = {side: compare(proxies, full, 2 * side) for side in SIDES}
        one = by_side[SIDES[0]]
        names = ("spearman", "spearman_low", "spearman_high", "kendall", "kendall_low", "kendall_high")
        row: dict[str, object] = {"tier": tier, "steps": steps} | {name: one[name] for name in names if name in one}
        for side, found in by_side.items():
            row |= {f"{name}_{side}": found[name] for name in ("best_beats", "worst_beats", "overlap")}
        rows.append(row)
        sides = " | ".join(f"{f['best_beats']:.1%} / {f['worst_beats']:.1%}" for f in by_side.values())
        line = f"| {tier} | {steps} | {one['kendall']:.3f} | {one['spearman']:.3f} | {sides} "
        print(f"{line}| {by_side[SIDES[-1]]['overlap']:.1%} |", flush=True)
    return rows


def measure_pruned(bench: Bench, seeds: int, keep: int) -> list[dict[str, object]]:
    """Pruned previews beside those of the same tier that are all finished."""
    full = bench.pool(Case(group="", name="", tier="float32", steps=10, micro_batch=MICRO_BATCH))
    rows: list[dict[str, object]] = []
    for tier in ("float32", "nvfp4-emulated"):
        plain = Case(group="pruned", name="all finished", tier=tier, micro_batch=MICRO_BATCH)
        whole = bench.pools(plain)
        rows.append(of_pruned(plain, whole, whole, full, keep))
        for after, share, units in itertools.product((1, 2, 3), (0.375, 0.5), (1, 2)):
            finished = round(share * seeds)
            case = replace(
                plain, name=f"after {after} keep {finished}", after=after, keep=finished, unit=seeds // units
            )
            rows.append(of_pruned(case, bench.pools(case), whole, full, keep))
    print_table(rows)
    return rows


def of_pruned(case: Case, pools: Pools, whole: Pools, full: np.ndarray, keep: int) -> dict[str, object]:
    size = full.shape[1]
    sampling = PoolSampling(
        tier=case.tier,
        steps=case.steps,
        micro_batch=case.micro_batch,
        pool=size,
        unit=case.unit or size,
        prune=Prune(after=case.after, keep=case.keep) if case.keep else None,
    )
    found = figures(pools.proxies, pools.finished, whole.proxies, full, keep)
    return {
        "tier": case.tier,
        "preview": case.name,
        "unit": sampling.unit,
        "steps": sampling.units * sampling.forwards * case.micro_batch / (size * case.steps),
        "decoded": sampling.units * sampling.decodings * case.micro_batch / size,
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--keep", type=int, default=8, help="seeds chosen of each pool")
    parser.add_argument("--only", default="", help="one of the groups, written to a file of its own")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--run", type=Path, help="folder of a finished run, for its last two policies")
    parser.add_argument("--work", type=Path, help="folder of what was sampled, from which a stopped benchmark goes on")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = load([ROOT / "configs" / "demo.yaml"])
    checkpoints = sorted((arguments.run / "checkpoints").iterdir())[-2:] if arguments.run else []
    policies = [LearnerState.load(folder).old for folder in checkpoints]
    bench = Bench(config, arguments.prompts, arguments.seeds, policies, arguments.work, arguments.device)
    if arguments.only == "published":
        rows = measure_published(bench)
    elif arguments.only == "pruned":
        rows = measure_pruned(bench, arguments.seeds, arguments.keep)
    else:
        rows = measure(bench, len(policies), arguments.keep, arguments.only)
    result = {
        "model": config.model.path,
        "policies": [folder.name for folder in checkpoints] or ["base"],
        "prompts": arguments.prompts,
        "seeds": arguments.seeds,
        "keep": arguments.keep,
        "torch": torch.__version__,
        **({"device": torch.cuda.get_device_name()} if arguments.device != "cpu" else {}),
        "previews": rows,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"rank_fidelity_{arguments.only}.json" if arguments.only else "rank_fidelity.json"
    (arguments.out / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
