"""The estimated duration of a run on a given fleet (of an iteration: `iteration.py`), and its bottlenecks.

The fleet is that of the configuration: explorers, regenerators and learner ranks. In `colocated` placement, one of each
shares a GPU; otherwise an explorer and a regenerator share a GPU if the sum of their `num_gpus` is at most 1. A process
without GPUs counts as one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage
from solrl_ray.planning import fitting, gpu_memory
from solrl_ray.planning.arithmetic import Arithmetic
from solrl_ray.planning.compiling import compiled
from solrl_ray.planning.iteration import Iteration, Orchestration, iteration
from solrl_ray.planning.prices import Cluster, Priced, PriceList, priced


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast(Iteration):
    """The estimated time of an iteration on the given GPUs, and its cost."""

    config: Config
    prices: PriceList
    priced: Priced
    gpus: int
    messages: str
    """Conditions under which the controller's costs were measured."""

    def gpu_hours(self, iterations: int) -> float:
        """GPU-hours of the iterations, without start, evaluations and the report."""
        return self.gpus * self.seconds * iterations / 3600

    def rows(self) -> list[tuple[str, str]]:
        """The rows of `solrl plan`: name, sum in words."""
        parts = ", ".join(f"{name} {_spent(seconds)}" for name, seconds in self.parts.items() if seconds)
        shares = ", ".join(f"{role} {share:.0%}" for role, share in self.busy.items())
        iterations = self.config.run.iterations
        figures = self.priced.figures.items()
        measured = [f"{name} {figure.time}" for name, figure in figures if figure.measured]
        estimates = [f"{name} {figure.time} ({figure.source})" for name, figure in figures if not figure.measured]
        sheet = " (from the data sheet)" if self.priced.from_data_sheet else ""
        return [
            ("time", f"{_spent(self.seconds)} an iteration on {self.gpus} × {self.prices.gpu}{sheet}: {parts}"),
            (
                "total time",
                f"{iterations} iterations take {self.seconds * iterations / 3600:.3g} h and "
                f"{self.gpu_hours(iterations):.3g} GPU-hours{sheet}, without start and evaluations",
            ),
            *([("compiling", words)] if (words := compiled(self.config)) else []),
            ("a step", self._step()),
            ("at work", shares),
            ("measured", "; ".join(measured) or f"no single step on {self.prices.gpu}"),
            ("ESTIMATED", "; ".join(estimates) or "none of these times"),
            ("Ray calls", f"what they take was measured: {self.messages}"),
        ]

    @property
    def choosing(self) -> float:
        """Share of GPU work that only selects seeds: previews, and discarded samples of one-stage strategies."""
        config = self.config
        explored = self.busy["explorers"] * config.fleet.explorers.count
        learned = self.busy["learners"] * config.learner.world_size
        work = explored + learned + self.busy["regenerators"] * config.fleet.regenerators.count
        return explored * (1 - config.rollout.keep / config.rollout.pool if is_one_stage(config) else 1.0) / work

    def _step(self) -> str:
        """What the shape of an iteration costs an optimiser step."""
        rollout, learner = self.config.rollout, self.config.learner
        prompts, seconds = rollout.prompts // learner.updates, self.seconds / learner.optimizer_steps
        return (
            f"{_spent(seconds)} and {self.gpus * seconds:,.0f} GPU-seconds an optimiser step, which learns from "
            f"{prompts} × {rollout.keep} samples; choosing seeds is {self.choosing:.0%} of the work"
        )


def forecast(arithmetic: Arithmetic, prices: PriceList, cluster: Cluster, controller: Orchestration) -> Forecast:
    """The forecast of one iteration. Raises `Unpriced` if the price list lacks a figure."""
    # With offloading resolved for the GPU; unchanged if the run does not fit or the GPU memory is unknown.
    made = (fitting.fitted(arithmetic, prices.device) if prices.device else None) or arithmetic
    cost = priced(made, prices, cluster)
    took = iteration(made.config, cost.stages, controller)
    return Forecast(
        config=arithmetic.config,
        prices=prices,
        priced=cost,
        gpus=gpu_memory.gpus(arithmetic.config),
        parts=took.parts,
        busy=took.busy,
        messages=controller.conditions,
    )


def _spent(seconds: float) -> str:
    """A duration with three digits: ``7.38 s``, from 100 s ``9.33 min``, from two hours ``2.5 h``."""
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
