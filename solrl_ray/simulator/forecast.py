"""Simulates how long a run takes on a given fleet, what delays it, and what to add next.

The fleet is the configuration's: explorers, regenerators and learner ranks. In `colocated` placement one of each is a
card; else an explorer and a regenerator share a GPU if their `num_gpus` fit on one together. A process with 0 is
counted as a GPU.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from solrl_ray.config import fitting
from solrl_ray.config.arithmetic import Arithmetic, describe, paragraphs
from solrl_ray.config.checks import staleness_problems
from solrl_ray.config.fleet import Worker
from solrl_ray.config.pools import apart, explorers_in_all, is_colocated, resized, shares
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import hedge, is_one_stage, pool_sampling
from solrl_ray.simulator.prices import Cluster, OrchestrationCosts, Priced, PriceList, orchestration, priced
from solrl_ray.simulator.records import SimulatedIteration
from solrl_ray.simulator.scenario import FREE, Disturbances, Scenario
from solrl_ray.simulator.simulation import Simulation

ITERATIONS = 3
"""Simulated iterations; more with failures, so that a rare one does not dominate."""
ITERATIONS_WITH_FAILURES = 20
WORTHWHILE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The same run with more GPUs, or with staleness."""

    text: str
    gpus: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    config: Config
    prices: PriceList
    priced: Priced
    gpus: int
    seconds: float
    """Mean of an iteration."""
    parts: dict[str, float]
    """Seconds of an iteration by what it waits for. Their sum is `seconds`, unless the iteration without the
    controller's costs is the longer one.
    """
    busy: dict[str, float]
    """Role → share of the iteration that its workers are busy; `controller`: share of the rollout."""
    options: tuple[Option, ...]
    messages: str
    """Source of the controller's costs."""

    @property
    def bottleneck(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])

    def gpu_hours(self, iterations: int) -> float:
        """Without start, evaluations and the report."""
        return self.gpus * self.seconds * iterations / 3600

    def rows(self) -> list[tuple[str, str]]:
        """The rows of `solrl plan`: name, sum in words."""
        parts = ", ".join(f"{name} {_spent(seconds)}" for name, seconds in self.parts.items() if seconds)
        shares = ", ".join(f"{role} {share:.0%}" for role, share in self.busy.items())
        iterations = self.config.run.iterations
        figures = self.priced.figures.items()
        measured = [f"{name} {figure.time}" for name, figure in figures if figure.measured]
        estimates = [f"{name} {figure.time} ({figure.source})" for name, figure in figures if not figure.measured]
        return [
            ("time", f"{_spent(self.seconds)} an iteration on {self.gpus} × {self.prices.gpu}: {parts}"),
            (
                "total time",
                f"{iterations} iterations take {self.seconds * iterations / 3600:.3g} h and "
                f"{self.gpu_hours(iterations):.3g} GPU-hours, without start and evaluations",
            ),
            *self._other_explorers(),
            ("at work", shares),
            ("bottleneck", f"{self.bottleneck}, {self.parts[self.bottleneck] / self.seconds:.0%} of the iteration"),
            ("add next", self._advice()),
            ("measured", "; ".join(measured) or f"no single step on {self.prices.gpu}"),
            ("ESTIMATED", "; ".join(estimates) or "none of these times"),
            ("Ray calls", f"what they take was measured: {self.messages}"),
        ]

    def _other_explorers(self) -> list[tuple[str, str]]:
        others = ", ".join(f"{other.count} × {other.name}" for other in self.config.fleet.other_explorers)
        text = f"{others}, counted as explorers like the rest: as fast, and without prompts of their own"
        return [("others", f"{text}; if they are slower, an iteration takes longer")] if others else []

    def _advice(self) -> str:
        gains = [option for option in self.options if option.seconds < (1 - WORTHWHILE) * self.seconds]
        if not self.options:
            return "nothing was tried"
        if not gains:
            tried = ", ".join(option.text for option in self.options)
            return f"nothing tried makes it faster ({tried})"
        return "; ".join(
            f"{option.text}: {_spent(option.seconds)} an iteration ({option.seconds / self.seconds - 1:+.0%}), "
            f"GPU-hours {option.seconds * option.gpus / (self.seconds * self.gpus) - 1:+.0%}"
            for option in sorted(gains, key=lambda option: option.seconds)
        )


def forecast(
    config: Config,
    arithmetic: Arithmetic,
    prices: PriceList,
    cluster: Cluster,
    controller: OrchestrationCosts,
    *,
    advise: bool = True,
) -> Forecast:
    """Simulate the run as configured and, to `advise`, with a node more of each kind.

    Raises UserError if a figure is missing.
    """
    cost = priced(config, arithmetic, prices, cluster)
    arithmetic = on_cards(arithmetic, prices)
    made = scenario(arithmetic.config, cost, cluster, controller)
    iterations = steady(made)
    moving = moving_weights(arithmetic, prices)
    seconds = statistics.fmean(i.seconds for i in iterations) + moving
    busy = {
        "explorers": _mean(iterations, "explorer") / (seconds * made.explorers),
        "regenerators": _mean(iterations, "regenerator") / (seconds * made.regenerators),
        "learners": cost.stages.update / seconds,
        "controller": _mean(iterations, "controller") / statistics.fmean(i.rollout for i in iterations),
    }

    def option(changed: Config, text: str) -> Option:
        larger = on_cards(describe(changed, arithmetic.facts), prices)
        cost = priced(changed, larger, prices, cluster)
        iterations = steady(scenario(larger.config, cost, cluster, controller))
        seconds = statistics.fmean(i.seconds for i in iterations) + moving_weights(larger, prices)
        return Option(text=text, gpus=gpus(changed), seconds=seconds)

    changes = (*_larger(config, cluster.gpus_per_node), *_ahead(config)) if advise else ()
    return Forecast(
        config=config,
        prices=prices,
        priced=cost,
        gpus=gpus(config),
        seconds=seconds,
        parts=_parts(made, iterations) | ({"frozen weights": moving} if moving else {}),
        busy=busy,
        options=tuple(option(*each) for each in changes),
        messages=controller.conditions,
    )


def times(arithmetic: Arithmetic, cluster: Cluster, prices: PriceList) -> str:
    """The forecast's table on such a cluster. Raises UserError as `forecast`."""
    return paragraphs(forecast(arithmetic.config, arithmetic, prices, cluster, orchestration()).rows())


def moving_weights(arithmetic: Arithmetic, prices: PriceList) -> float:
    """Seconds of an iteration in which weights that had left a card come back (`fleet.offload`)."""
    return fitting.seconds(arithmetic, prices.card.host_link) if prices.card else 0.0


def on_cards(arithmetic: Arithmetic, prices: PriceList) -> Arithmetic:
    """The run with what such cards decide; as it is if it does not fit them, or their memory is not known."""
    return (fitting.fitted(arithmetic, prices.card) if prices.card else None) or arithmetic


def scenario(config: Config, cost: Priced, cluster: Cluster, controller: OrchestrationCosts) -> Scenario:
    """The configuration's fleet and work, as input of the simulation."""
    rollout = config.rollout
    return Scenario(
        prompts=rollout.prompts,
        pool=rollout.pool,
        keep=rollout.keep,
        unit=pool_sampling(config).unit,
        explorers=explorers_in_all(config.fleet),  # treated as if all were alike
        regenerators=config.fleet.regenerators.count,
        learners=config.learner.world_size,
        max_inflight=config.fleet.max_inflight,
        hedge=hedge(config),
        one_stage=is_one_stage(config),
        max_staleness=rollout.max_staleness,
        cards=config.learner.world_size * is_colocated(config.fleet),
        shared=not is_colocated(config.fleet) and shared(config),
        staged=bool(config.fleet.offload),
        stages=cost.stages,
        orchestration=controller.seconds(),
        network=cost.network,
        disturbances=Disturbances(
            spread=cluster.spread or 0.0,
            mtbf=cluster.mtbf_hours * 3600 if cluster.mtbf_hours else math.inf,
            restart=cluster.restart_seconds,
        ),
        seed=config.run.seed,
    )


def shared(config: Config) -> bool:
    """Whether an explorer and a regenerator, in processes of their own, share a GPU."""
    explorers, regenerators = config.fleet.explorers, config.fleet.regenerators
    return shares(explorers) and shares(regenerators) and explorers.num_gpus + regenerators.num_gpus <= 1


def gpus(config: Config) -> int:
    """GPUs of the whole fleet. A process has its share of one GPU; the largest shares are placed first."""
    groups: tuple[tuple[int, Worker], ...] = (
        *((pool.count, pool) for pool in apart(config).values()),
        (config.learner.world_size, config.fleet.learners),
    )
    free: list[float] = []
    """What is left of each GPU."""
    whole = 0
    for share in sorted((worker.num_gpus or 1.0 for count, worker in groups for _ in range(count)), reverse=True):
        if share >= 1:
            whole += math.ceil(share)
            continue
        at = next((at for at, left in enumerate(free) if left >= share - 1e-6), -1)
        if at < 0:
            free.append(1.0)
        free[at] -= share
    return whole + len(free)


def steady(made: Scenario) -> list[SimulatedIteration]:
    """Simulated iterations without the first."""
    count = ITERATIONS_WITH_FAILURES if math.isfinite(made.disturbances.mtbf) else ITERATIONS
    return list(Simulation(made).run(count + 1))[1:]


def _parts(made: Scenario, iterations: list[SimulatedIteration]) -> dict[str, float]:
    """Seconds by what is waited for; the controller's share is what a run without its costs would save."""
    free = iterations if made.orchestration == FREE else steady(replace(made, orchestration=FREE))
    mean = statistics.fmean
    load = made.stages.merge if made.cards else made.stages.load
    load += made.network.arrival(0, 1) if made.network and not made.cards else 0.0
    # An explorer that explored ahead has loaded its revision long before.
    load = min(load, mean(i.explored for i in free))
    return {
        "explore": mean(i.explored for i in free) - load,
        "regenerate after exploring": mean(i.rollout - i.explored for i in free),
        "learn": mean(i.update for i in free),
        "publish": mean(i.publish for i in free) + load,
        "orchestration": max(0.0, mean(i.seconds for i in iterations) - mean(i.seconds for i in free)),
    }


def _larger(config: Config, node: int) -> list[tuple[Config, str]]:
    """The same run with a node more of each kind."""
    fleet, learner = config.fleet, config.learner
    sizes = {"explorers": fleet.explorers.count + node, "regenerators": fleet.regenerators.count + node}
    ranks = {"learner": learner.model_copy(update={"world_size": learner.world_size + node})}
    if is_colocated(config.fleet):
        everywhere = config.model_copy(update={"fleet": resized(fleet, sizes), **ranks})
        return [(everywhere, f"{node} more GPUs with one of each")]
    if is_one_stage(config):
        del sizes["regenerators"]
    return [
        *(
            (config.model_copy(update={"fleet": resized(fleet, {name: size})}), f"{node} more {name}")
            for name, size in sizes.items()
        ),
        (config.model_copy(update=ranks), f"{node} more learner ranks"),
    ]


def _ahead(config: Config) -> list[tuple[Config, str]]:
    """The same GPUs with `rollout.max_staleness` 1, if that is a different and allowed run."""
    ahead = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_staleness": 1})})
    if config.rollout.max_staleness or any(staleness_problems(ahead)):
        return []
    return [(ahead, "exploring one iteration ahead (rollout.max_staleness 1)")]


def _spent(seconds: float) -> str:
    """Seconds for reading, with three digits: ``7.38 s``, from 100 s on ``9.33 min``, from two hours on ``2.5 h``."""
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _mean(iterations: list[SimulatedIteration], role: str) -> float:
    return statistics.fmean(iteration.busy[role] for iteration in iterations)
