"""What do fleets cost that nobody has at hand?

    python benchmarks/scaling.py                 # plans of FLUX.1-dev on up to 10,000 cards, candidates a second
    python benchmarks/scaling.py --calibrate     # what messages cost here, with a real Ray: for controller.yaml

FLUX.1-dev at 512 px by the published method, which finishes all previews, with the stage times of
`price_lists/h200.yaml`. Its steps, decoding and rewards are measured; the learner's passes, revisions, checkpoints and
the network are estimates.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.workers.selector import Selector
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.plan.arithmetic import ModelFacts, describe
from solrl_ray.plan.forecast import Forecast, forecast
from solrl_ray.plan.iteration import Orchestration, Stages, iteration
from solrl_ray.plan.prices import Cluster, orchestration, price_list
from solrl_ray.records import Address, UnitResult, WorkUnit
from solrl_ray.sampling.noise import uniform
from solrl_ray.scheduling.dispatcher import Dispatcher
from solrl_ray.scheduling.iteration_state import IterationPlan

ROOT = Path(__file__).parents[1]
FLUX = ModelFacts(
    latent_shape=(1024, 64),
    parameters=11_901_408_320,
    lora_modules=190,
    lora_parameters=37_355_520,
    packed_bytes=1_008_599_040,
    touched_parameters=1_793_064_960,
)
CLUSTER = Cluster(gpu="h200")
CARDS = (1, 8, 64, 256, 1024, 4096, 10_000)
TOGETHER, ROUNDS = 32, 60
"""Messages that are sent together, and how often."""
SECONDS, ITERATIONS = 0.1, 12
"""Of the stages of the real runs of `--calibrate`, and of which the first is not counted."""
Rows = list[dict[str, Any]]


def flux(explorers: int, regenerators: int, learners: int, prompts: int = 48, placement: str = "split") -> Config:
    files = [ROOT / "configs/methods/sol_rl_published.yaml", ROOT / "configs/models/flux1_dev.yaml"]
    overrides = (
        "prompts={train: train.txt, heldout: heldout.txt}",
        "rewards=[{kind: clipscore, path: clip}]",
        f"rollout={{prompts: {prompts}, explore: {{precision: fp8}}, preview: {{prune: null}}}}",
        f"fleet={{explorers: {{count: {explorers}}}, regenerators: {{count: {regenerators}}}}}",
        f"fleet.placement={placement}",
        f"learner.world_size={learners}",
    )
    return load(files, overrides)


def planned(*fleet: Any) -> Forecast:
    config = flux(*fleet)
    return forecast(describe(config, FLUX), price_list(CLUSTER.gpu), CLUSTER, orchestration())


def weak_scaling() -> Rows:
    """A prompt a card."""
    rows = []
    for cards in CARDS:
        made = planned(cards, cards, cards, cards, "colocated")
        parts = {name: seconds for name, seconds in made.parts.items() if name != "checkpoint"}
        rows.append({"cards": cards, "seconds": made.seconds, **parts, "controller_busy": made.busy["controller"]})
    return rows


def splits() -> Rows:
    """48 prompts: the fastest split tried, none with more than a regenerator a prompt; and one process a GPU."""
    rows = []
    for gpus in (8, 16, 32, 64, 128, 256):
        tried = []
        for learners in sorted({max(1, round(gpus * share)) for share in (0.25, 0.375, 0.5, 0.625, 0.75)}):
            for part in (0.1, 0.2, 0.35, 0.5):
                regenerators = min(48, max(1, round((gpus - learners) * part)))
                if explorers := gpus - learners - regenerators:
                    tried.append(planned(explorers, regenerators, learners).seconds)
        one_process = planned(gpus, gpus, gpus, 48, "colocated").seconds
        rows.append({"gpus": gpus, "split": min(tried), "one_process": one_process})
    return rows


def selector_plan(prompts: int, micro_batch: int) -> tuple[IterationPlan, list[UnitResult]]:
    """An iteration with pools of the published size, and the results of all its units."""
    plan = IterationPlan(
        iteration=0,
        revision=0,
        prompt_ids=tuple(f"{number:016x}" for number in range(prompts)),
        pool=96,
        keep=24,
        unit=micro_batch,
    )
    rewards = {
        prompt: uniform(Address(run_seed=0, purpose="reward", prompt_id=prompt), (96,)).tolist()
        for prompt in plan.prompt_ids
    }
    results = [
        UnitResult(
            unit=unit,
            rewards=tuple(rewards[unit.prompt_id][index] for index in unit.indices),
            worker="w",
            score_class="c",
            seconds=0.0,
        )
        for unit in plan.pool_units()
    ]
    return plan, results


def selector_throughput(prompts: int = 400) -> Rows:
    """Candidates that a selector with its journal takes in a second, in one process: it waits for the disk once for all
    results that come together."""
    rows: Rows = []
    for micro_batch in (24, 4):
        plan, results = selector_plan(prompts, micro_batch)
        for together in (1, 8, 64):
            with tempfile.TemporaryDirectory() as folder:
                selector = Selector(Path(folder))
                selector.open(plan)
                began = time.perf_counter()
                for start in range(0, len(results), together):
                    selector.accept(results[start : start + together])
                seconds = time.perf_counter() - began
                selector.drop(plan.iteration)
            rows.append({"micro_batch": micro_batch, "together": together, "per_second": 96 * prompts / seconds})
    return rows


QUESTIONS: dict[str, Callable[[], Rows]] = {
    "weak_scaling": weak_scaling,
    "splits": splits,
    "selector_throughput": selector_throughput,
}


def show(name: str, rows: Rows) -> None:
    print(f"\n{name}")
    print("  ".join(f"{key[:18]:>18}" for key in rows[0]))
    for row in rows:
        print("  ".join(f"{value:>18.4g}" for value in row.values()))


def slept(costs: Orchestration, work: Any) -> tuple[float, float]:
    """Seconds of a real iteration with one explorer and stages that sleep, and of its plan."""
    import orchestration as benchmark

    with tempfile.TemporaryDirectory() as root:
        measured = benchmark.measure(1, SECONDS, ITERATIONS, Path(root), work)["measured_seconds"]
        config = benchmark.sleeping_config(1, SECONDS, ITERATIONS, Path(root), work)
    return measured, iteration(config, Stages(explore=SECONDS, regenerate=SECONDS, update=SECONDS), costs).seconds


class Echo:
    """Answers at once."""

    def done(self, unit: WorkUnit) -> WorkUnit:
        return unit


async def message_seconds() -> float:
    """Median CPU time of the controller's thread for choosing a worker for a unit, sending it and taking the answer.
    Wall time would count who else wants this machine's cores.
    """
    import ray

    actor, seconds = ray.remote(Echo).options(num_cpus=0).remote(), []
    for number in range(ROUNDS):
        dispatcher = Dispatcher(max_inflight=2, hedge=3.0)
        for worker in range(TOGETHER):
            dispatcher.ready(f"explorer-{worker}", "explorers", ("old", number))
        units = [
            WorkUnit(stage="explore", iteration=number, revision=number, prompt_id=f"{each:016x}", indices=(0,))
            for each in range(TOGETHER)
        ]
        began = time.thread_time()
        dispatcher.add(units, batch="", pool="explorers")
        given = dispatcher.assign(0.0)
        for answer in [actor.done.remote(each.unit) for each in given]:
            await answer
        for each in given:
            dispatcher.answered(each.worker, each.unit, now=1.0, seconds=1.0)
            dispatcher.done(each.unit)
        seconds.append((time.thread_time() - began) / TOGETHER)
    return statistics.median(seconds)


def calibrate() -> None:
    """Print the lines of ``price_lists/controller.yaml``, milliseconds: a message, and what it does not explain of real
    iterations with one explorer and short stages, of each unit and of the whole."""
    import orchestration as benchmark  # it sets up Ray
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
    costs = Orchestration(conditions="this machine", message=1000 * asyncio.run(message_seconds()))
    units, unexplained = [], []
    for work in (benchmark.SHORT, benchmark.Work(16, 3)):
        measured, told = slept(costs, work)
        units.append(work.prompts * work.units)
        unexplained.append(measured - told)
    gap = max(0.0, (unexplained[1] - unexplained[0]) / (units[1] - units[0]))
    rest = max(0.0, unexplained[0] - units[0] * gap)
    print(
        f'conditions: "median of {ROUNDS} x {TOGETHER} calls, Ray {ray.__version__}, Python '
        f'{platform.python_version()}, {os.cpu_count()} cores; load average {os.getloadavg()[0]:.1f}"'
    )
    for name, ms in {"message": costs.message, "gap": 1000 * gap, "iteration": 1000 * rest}.items():
        print(f"{name}: {ms:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibrate", action="store_true", help="measure the controller's messages with a real Ray")
    if parser.parse_args().calibrate:
        calibrate()
    else:
        for name, question in QUESTIONS.items():
            show(name, question())


if __name__ == "__main__":
    main()
