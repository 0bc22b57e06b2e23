"""What would fleets cost that nobody has at hand? The live run's dispatcher, iteration state and worker states in
virtual time.

    python benchmarks/scaling.py                 # all questions below, simulated: CPU alone, minutes
    python benchmarks/scaling.py --calibrate     # what messages cost here, with a real Ray and a real selector
    python benchmarks/scaling.py --validate      # simulated beside real runs with stages that sleep

FLUX.1-dev at 512 px by the published method, which finishes all previews, with the stage times of
`price_lists/h200.yaml`. Its steps, decoding and rewards are measured; the learner's passes, revisions, checkpoints, the
network and restarts are estimates. Questions: weak scaling (a prompt an explorer), stragglers, failures, fan-out of a
revision, the best split of a number of GPUs, the controller's share, and candidates a second through the selector.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from actors.workers.selector import Selector
from solrl_ray.config.arithmetic import ModelFacts, describe
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.records import Address, UnitResult
from solrl_ray.sampling.noise import uniform
from solrl_ray.scheduling.iteration_state import IterationPlan
from solrl_ray.simulator.forecast import scenario
from solrl_ray.simulator.prices import Cluster, orchestration, price_list, priced
from solrl_ray.simulator.scenario import Disturbances, Orchestration, Scenario
from solrl_ray.simulator.simulation import Simulation

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FLUX = ModelFacts(
    latent_shape=(1024, 64),
    parameters=11_901_408_320,
    lora_modules=190,
    lora_parameters=37_355_520,
    packed_bytes=1_008_599_040,
    touched_parameters=1_793_064_960,
)
CLUSTER = Cluster(gpu="h200", spread=0.05)
EXPLORERS = (1, 4, 16, 64, 256, 1024, 4096, 10_000)
HEDGES = (0.0, 3.0, 2.0)
"""Medians of a unit's stage after which an idle worker does it as well, where a straggler needs three; 0: never."""
LEARNERS = (8, 16, 32, 64, 128, 256, 512, 1024)
Rows = list[dict[str, Any]]


def flux(explorers: int, regenerators: int, learners: int, prompts: int = 48, placement: str = "split") -> Config:
    files = [ROOT / "configs/methods/sol_rl.yaml", ROOT / "configs/models/flux1_dev.yaml"]
    overrides = (
        "prompts={train: train.txt, heldout: heldout.txt}",
        "rewards=[{kind: clipscore, path: clip}]",
        f"rollout={{prompts: {prompts}, explore: {{precision: fp8}}, preview: {{prune: null}}}}",
        f"fleet={{explorers: {{count: {explorers}}}, regenerators: {{count: {regenerators}}}}}",
        f"fleet.placement={placement}",
        f"learner.world_size={learners}",
    )
    return load(files, overrides)


def made(explorers: int, regenerators: int, learners: int, prompts: int = 48, placement: str = "split") -> Scenario:
    config = flux(explorers, regenerators, learners, prompts, placement)
    cost = priced(config, describe(config, FLUX), price_list(CLUSTER.gpu), CLUSTER)
    return scenario(config, cost, CLUSTER, orchestration())


def mean_seconds(simulated: Scenario, iterations: int = 1) -> float:
    return statistics.fmean(iteration.seconds for iteration in Simulation(simulated).run(iterations))


def overhead(simulated: Scenario) -> float:
    """Share of an iteration that a controller without costs would save."""
    seconds = mean_seconds(simulated)
    return 1 - mean_seconds(replace(simulated, orchestration=Orchestration())) / seconds


def weak_scaling() -> Rows:
    rows = []
    for explorers in EXPLORERS:
        began = time.process_time()
        simulated = made(explorers, explorers, min(1024, max(8, explorers)), prompts=explorers)
        iteration = Simulation(simulated).iterate()
        free = Simulation(replace(simulated, orchestration=Orchestration())).iterate()
        cpu = time.process_time() - began
        rows.append(
            {
                "explorers": explorers,
                "rollout": iteration.rollout,
                "without_controller": free.rollout,
                "controller_busy": iteration.busy["controller"] / iteration.rollout,
                "cpu_seconds": cpu / 2,
            }
        )
    return [row | {"efficiency": rows[0]["rollout"] / row["rollout"]} for row in rows]


def stragglers() -> Rows:
    """Without and with late units that an idle worker does as well."""
    base, rows = made(64, 32, 64), []
    for share in (0.0, 0.01, 0.05, 0.1, 0.2):
        disturbed = replace(base, disturbances=Disturbances(spread=0.05, slow_share=share, slow_factor=3.0))
        row = {"slow_share": share, "factor": 3.0}
        for hedge in HEDGES:
            runs = [Simulation(replace(disturbed, seed=seed, hedge=hedge)).iterate() for seed in range(10)]
            name = f"rollout_hedge_{hedge:g}" if hedge else "rollout"
            row[name] = statistics.fmean(run.rollout for run in runs)
        rows.append(row)
    return rows


def failures() -> Rows:
    base, rows = made(256, 48, 64, prompts=256), []
    for hours in (math.inf, 1000.0, 100.0, 10.0):
        disturbed = replace(base, disturbances=Disturbances(spread=0.05, mtbf=hours * 3600, restart=60.0))
        iterations = list(Simulation(disturbed).run(8))
        rows.append(
            {
                "mtbf_hours": hours if math.isfinite(hours) else None,
                "seconds": statistics.fmean(i.seconds for i in iterations),
                "lost_an_iteration": statistics.fmean(i.lost for i in iterations),
            }
        )
    return rows


def fan_out() -> Rows:
    """Until the last of the nodes has a revision of the size of FLUX.1-dev's mean one."""
    network = made(8, 8, 8).network
    assert network is not None
    return [
        {"nodes": nodes, "fanout": fanout, "seconds": replace(network, fanout=fanout).arrival(nodes - 1, nodes)}
        for nodes in (8, 128, 1250)
        for fanout in (1, 2, 4, 8, nodes)
    ]


def best_split() -> Rows:
    """The fastest of the tried splits, none with more than a regenerator a prompt; and one process a GPU."""
    rows = []
    for gpus in LEARNERS:
        tried = []
        for learners in sorted({max(1, round(gpus * share)) for share in (0.25, 0.375, 0.5, 0.625, 0.75)}):
            for part in (0.1, 0.2, 0.35, 0.5):
                regenerators = min(48, max(1, round((gpus - learners) * part)))
                explorers = gpus - learners - regenerators
                if explorers > 0:
                    seconds = mean_seconds(made(explorers, regenerators, learners))
                    tried.append((seconds, explorers, regenerators, learners))
        seconds, explorers, regenerators, learners = min(tried)
        shared = mean_seconds(made(gpus, gpus, gpus, placement="colocated"))
        rows.append(
            {
                "gpus": gpus,
                "split_seconds": seconds,
                "explorers": explorers,
                "regenerators": regenerators,
                "learners": learners,
                "colocated_seconds": shared,
            }
        )
    return rows


def controller_share() -> Rows:
    """Stages of 1 s, two units a prompt, and with as many an explorer as the published run has on four of them; and
    FLUX.1-dev's stages."""
    rows = []
    for explorers in (1, 4, 16, 64, 256, 1000):
        stages = made(explorers, math.ceil(explorers / 2), max(8, explorers), prompts=max(8, explorers))
        rows.append(
            {
                "explorers": explorers,
                "stages_of_1_s": overhead(sleeping(explorers, max(8, 2 * explorers), 2)),
                "published_size": overhead(sleeping(explorers, 12 * explorers, 4)),
                "flux": overhead(stages),
            }
        )
    return rows


def sleeping(explorers: int, prompts: int, units: int, stage: float = 1.0) -> Scenario:
    """Stages of one length, as `orchestration.py` has them."""
    import orchestration as benchmark  # which sets up Ray

    return benchmark.scenario(explorers, stage, orchestration().seconds(), benchmark.Work(prompts, units))


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
    "stragglers": stragglers,
    "failures": failures,
    "fan_out": fan_out,
    "best_split": best_split,
    "controller_share": controller_share,
    "selector_throughput": selector_throughput,
}


def show(name: str, rows: Rows) -> None:
    print(f"\n{name}")
    print("  ".join(f"{key:>18}" for key in rows[0]))
    for row in rows:
        print("  ".join(f"{'-' if v is None else f'{v:.4g}' if isinstance(v, float) else v:>18}" for v in row.values()))


def validate(seconds: list[float], explorers: list[int], iterations: int) -> None:
    """Real runs with sleeping stages beside the same scenario, whose costs come from `--calibrate`."""
    import orchestration as benchmark
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
    rows = []
    for stage in seconds:
        for count in explorers:
            with tempfile.TemporaryDirectory() as root:
                measured = benchmark.measure(count, stage, iterations, Path(root))["measured_seconds"]
            simulated = sleeping(count, benchmark.SHORT.prompts, benchmark.SHORT.units, stage)
            predicted = mean_seconds(simulated, 2)
            rows.append(
                {
                    "stage_seconds": stage,
                    "explorers": count,
                    "measured": measured,
                    "simulated": predicted,
                    "error": predicted / measured - 1,
                }
            )
            show("validation", rows[-1:])
    write("scaling_validation", {"validation": rows})


def write(name: str, content: dict[str, Any]) -> None:
    import os

    RESULTS.mkdir(exist_ok=True)
    conditions = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "controller": orchestration().model_dump(),
        "cluster": CLUSTER.model_dump(),
        "stages": asdict(made(1, 1, 8).stages),
    }
    text = json.dumps({"conditions": conditions} | content, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibrate", action="store_true", help="measure the controller's messages with a real Ray")
    parser.add_argument("--validate", action="store_true", help="run real fleets with stages that sleep")
    parser.add_argument("--seconds", type=float, nargs="+", default=[1.0], help="stage lengths for --validate")
    parser.add_argument("--explorers", type=int, nargs="+", default=[1, 2, 4], help="for --validate")
    parser.add_argument("--iterations", type=int, default=4, help="for --validate; the first one is not counted")
    arguments = parser.parse_args()
    if arguments.calibrate:
        from controller_costs import calibrate

        calibrate()
    elif arguments.validate:
        validate(arguments.seconds, arguments.explorers, arguments.iterations)
    else:
        results = {}
        for name, question in QUESTIONS.items():
            results[name] = question()
            show(name, results[name])
        write("scaling", results)


if __name__ == "__main__":
    main()
