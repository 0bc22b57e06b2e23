"""What share of an iteration is not stage work? Real actors, selector, journal and checkpoints; stages that sleep.

    python benchmarks/orchestration.py --explorers 1 2 4 --seconds 1.0 [--published]

A explore unit, a regeneration and an update each sleep for `--seconds`. The yardstick is the same schedule without
any cost: the same units on the same workers, list-scheduled (`ideal_seconds`). Overhead is (measured - ideal) /
measured over whole iterations: messages, waiting, journal, checkpoint and publication included.

Iterations are short: 8 prompts in 2 units each. With `--published` also one of the published size, 48 prompts in 4
units, with the most explorers.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"  # loopback only

import ray
import torch

from actors.client import launch
from actors.cluster.rpc import Callee
from actors.fleet.actor_factory import ActorClasses
from actors.workers.regenerator import Evaluated
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.learning.state import LearnerState, PolicyFactors
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.prompts.embedding_cache import embedding_digest
from solrl_ray.records import (
    Address,
    Attestation,
    Prompt,
    PromptEmbedding,
    Receipt,
    SampleGroup,
    UnitResult,
    WorkUnit,
)
from solrl_ray.sampling.noise import uniform
from solrl_ray.weight_sync.manifest import Policy
from solrl_ray.weight_sync.payload import Payload
from solrl_ray.weight_sync.publish import Publisher, RevisionShard

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
KEEP, MICRO_BATCH = 4, 4
LATENTS = (64, 16)
MODULE = "block.to_q"


@dataclass(frozen=True, slots=True)
class Work:
    """Of an iteration."""

    prompts: int
    units: int
    """Preview units of each prompt."""


SHORT, PUBLISHED = Work(8, 2), Work(48, 4)


class SleepingEncoder(Callee):
    def __init__(self, config: Config) -> None:
        pass

    def start(self) -> dict[str, str]:
        return {}

    def embed(self, prompts: Sequence[Prompt]) -> list[PromptEmbedding]:
        tensors = {"prompt_embeds": torch.zeros(1)}
        digest = embedding_digest(tensors)
        return [PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest=digest) for prompt in prompts]


class SleepingWorker(Callee):
    """Holds revisions as a real worker does and proves them; its stages sleep."""

    role = ""

    def __init__(self, name: str, config: Config) -> None:
        self._name = name
        self._seconds = float(config.run.name.split("-")[-1])

    def start(self) -> Attestation:
        return Attestation(worker=self._name, device="none", tier="sleep", score_class="sleep", checks={})

    def load_revision(self, payload: Payload, probe: PromptEmbedding, full: bool) -> Receipt:
        revision = payload.manifest
        expected = revision.expected[self.role]
        return Receipt(
            worker=self._name,
            role=self.role,
            revision=revision.revision,
            score_class="sleep",
            policy=revision.policy,
            bound_modules=expected.modules,
            buffer_digest=expected.digest,
            probe_digest="",
        )

    def rewards(self, unit: WorkUnit) -> tuple[float, ...]:
        address = Address(run_seed=0, purpose="reward", prompt_id=unit.prompt_id, index=unit.indices[0])
        return tuple(uniform(address, (len(unit.indices),)).tolist())

    def slept(self, unit: WorkUnit) -> UnitResult:
        time.sleep(self._seconds)
        return UnitResult(
            unit=unit,
            rewards=self.rewards(unit),
            worker=self._name,
            score_class="sleep",
            seconds=self._seconds,
            started=time.time() - self._seconds,
        )


class SleepingExplorer(SleepingWorker):
    role = "explorer"

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        return self.slept(unit)


class SleepingRegenerator(SleepingWorker):
    role = "regenerator"

    def regenerate(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> tuple[UnitResult, SampleGroup]:
        result = self.slept(unit)
        group = SampleGroup(
            iteration=unit.iteration,
            revision=unit.revision,
            prompt_id=unit.prompt_id,
            indices=unit.indices,
            rewards=result.rewards,
            latents=torch.zeros(len(unit.indices), *LATENTS),
            seconds=self._seconds,
            worker=self._name,
        )
        return result, group

    def evaluate(
        self, unit: WorkUnit, prompts: Sequence[Prompt], pictures: int, *embeddings: PromptEmbedding
    ) -> Evaluated:
        return Evaluated(unit=unit, rewards=self.rewards(unit), images=None, seconds=0.0, started=time.time())


class SleepingLearner(Callee):
    """A learner whose update sleeps; state, factors and revisions have real formats."""

    def __init__(self, config: Config, rank: int) -> None:
        self._seconds = float(config.run.name.split("-")[-1])
        self._updates = self._samples = 0
        self._publisher = Publisher({MODULE: torch.ones(32, 32)}, config.model.lora, formats={MODULE: "nvfp4"})
        rank_of_lora = config.model.lora.rank
        self._factors = {
            f"{MODULE}.lora_A": torch.ones(rank_of_lora, 32),
            f"{MODULE}.lora_B": torch.zeros(32, rank_of_lora),
        }

    def start(self) -> str:
        return "here"

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", 0

    def join(self, address: str, port: int, one_host: bool) -> None:
        pass

    def offer(self, *arguments: Any) -> None:
        """It sleeps in `update` for all samples at once."""

    def feed(self, iteration: int, groups: list[Any], embeddings: list[Any]) -> None:
        self._samples = sum(len(group.indices) for group in ray.get(groups, timeout=60))

    def update(self, iteration: int) -> UpdateMetrics:
        time.sleep(self._seconds)
        self._updates += 1
        return UpdateMetrics(
            iteration=iteration,
            revision=self._updates,
            loss=0.0,
            policy_loss=0.0,
            kl=0.0,
            gradient_norm=0.0,
            samples=self._samples,
            passes=1,
            seconds=self._seconds,
        )

    def state(self) -> LearnerState:
        def copy() -> dict[str, torch.Tensor]:
            return {name: factor.clone() for name, factor in self._factors.items()}

        return LearnerState(
            updates=self._updates,
            steps=self._updates,
            default=copy(),
            old=copy(),
            ema=copy(),
            exp_avg=copy(),
            exp_avg_sq=copy(),
        )

    def factors(self, policy: Policy) -> PolicyFactors:
        return PolicyFactors(self._factors)

    def shard(self, policy: Policy, tier: str, pack: bool) -> RevisionShard:
        return self._publisher.shard(self._updates, self._factors, policy=policy, pack=pack)


def ideal_seconds(explorers: int, regenerators: int, stage: float, work: Work = SHORT) -> float:
    """One iteration without any cost: units in plan order to the first free worker, then one update."""
    explorer_free, regenerator_free = [0.0] * explorers, [0.0] * regenerators
    selected = [0.0] * work.prompts
    for prompt in range(work.prompts):
        for _ in range(work.units):
            done = heapq.heappop(explorer_free) + stage
            heapq.heappush(explorer_free, done)
            selected[prompt] = max(selected[prompt], done)
    finished = 0.0
    for ready in sorted(selected):
        done = max(heapq.heappop(regenerator_free), ready) + stage
        heapq.heappush(regenerator_free, done)
        finished = max(finished, done)
    return finished + stage


def sleeping_config(explorers: int, stage: float, iterations: int, root: Path, work: Work = SHORT) -> Config:
    """As many regenerators as explorers; every stage takes `stage` seconds."""
    overrides = (
        f"run={{name: 'sleep-{explorers}-{stage}', root: '{root}', iterations: {iterations}}}",
        f"rollout={{prompts: {work.prompts}, pool: {work.units * MICRO_BATCH}, keep: {KEEP}}}",
        f"rollout.explore.micro_batch={MICRO_BATCH}",
        "evaluation={every: 0, prompts: 2, samples: 2, pictures: 0, reference: ''}",
        f"fleet={{explorers: {{count: {explorers}}}, regenerators: {{count: {explorers}}}}}",
    )
    return load([ROOT / "configs" / "demo.yaml"], overrides)


def sleeping_classes(explorer: type = SleepingExplorer) -> ActorClasses:
    return ActorClasses(
        text_encoder=SleepingEncoder,
        explorer=explorer,
        regenerator=SleepingRegenerator,
        learner=SleepingLearner,
    )


def measure(explorers: int, stage: float, iterations: int, root: Path, work: Work = SHORT) -> dict[str, Any]:
    """Run and compare; the first iteration, which also publishes for the first time, is left out."""
    config = sleeping_config(explorers, stage, iterations, root, work)
    launch.train(config, live=False, classes=sleeping_classes())
    folder = root / config.run.name
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    totals = [r["seconds"]["total"] for r in records if r["event"] == "iteration" and r["iteration"] > 0]
    ideal = ideal_seconds(explorers, explorers, stage, work)
    measured = statistics.median(totals)
    return {
        "prompts": work.prompts,
        "units": work.units,
        "explorers": explorers,
        "stage_seconds": stage,
        "iterations": len(totals),
        "ideal_seconds": ideal,
        "measured_seconds": measured,
        "overhead": (measured - ideal) / measured,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--explorers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=1.0, help="length of every stage")
    parser.add_argument("--iterations", type=int, default=4, help="the first one is not counted")
    parser.add_argument("--published", action="store_true", help="also an iteration of the published size")
    arguments = parser.parse_args()
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
    rows = []
    asked = [(explorers, SHORT) for explorers in arguments.explorers]
    asked += [(max(arguments.explorers), PUBLISHED)] * arguments.published
    for explorers, work in asked:
        with tempfile.TemporaryDirectory() as root:
            rows.append(measure(explorers, arguments.seconds, arguments.iterations, Path(root), work))
    print(f"{'prompts':>7} {'units':>5} {'explorers':>9} {'ideal s':>8} {'measured s':>10} {'overhead':>9}")
    for row in rows:
        print(
            f"{row['prompts']:>7} {row['units']:>5} {row['explorers']:>9} {row['ideal_seconds']:>8.2f} "
            f"{row['measured_seconds']:>10.3f} {row['overhead']:>9.2%}"
        )
    RESULTS.mkdir(exist_ok=True)
    conditions = {
        "units": "prompts x explore units, as many regenerations as prompts, 1 update",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "ray": ray.__version__,
    }
    content = {"conditions": conditions, "rows": rows}
    (RESULTS / "orchestration.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
