"""How long a run takes on a given fleet (an iteration: `iteration.py`), what delays it, and what to add next.

The fleet is the configuration's: explorers, regenerators and learner ranks. In `colocated` placement one of each is a
card; else an explorer and a regenerator share a GPU if their `num_gpus` fit on one together. A process with 0 is
counted as a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from solrl_ray.config.checks import staleness_problems
from solrl_ray.config.pools import explorers_in_all, is_colocated, resized
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage
from solrl_ray.plan import fitting, gpu_memory
from solrl_ray.plan.arithmetic import Arithmetic, describe, paragraphs
from solrl_ray.plan.compiling import Compiling
from solrl_ray.plan.iteration import Iteration, Orchestration, iteration
from solrl_ray.plan.prices import Cluster, Priced, PriceList, orchestration, priced

WORTHWHILE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The same run with more GPUs, or with staleness."""

    text: str
    gpus: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast(Iteration):
    """An iteration of a run on such cards, and what it would take otherwise."""

    config: Config
    prices: PriceList
    priced: Priced
    gpus: int
    messages: str
    """Source of the controller's costs."""
    options: tuple[Option, ...] = ()

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
        sheet = " (from the data sheet)" if self.priced.from_data_sheet else ""
        return [
            ("time", f"{_spent(self.seconds)} an iteration on {self.gpus} × {self.prices.gpu}{sheet}: {parts}"),
            (
                "total time",
                f"{iterations} iterations take {self.seconds * iterations / 3600:.3g} h and "
                f"{self.gpu_hours(iterations):.3g} GPU-hours{sheet}, without start and evaluations",
            ),
            *([("compiling", words)] if (words := Compiling.of(self.config).words) else []),
            ("a step", self._step()),
            *self._other_explorers(),
            ("at work", shares),
            ("bottleneck", f"{self.bottleneck}, {self.parts[self.bottleneck] / self.seconds:.0%} of the iteration"),
            ("add next", self._advice()),
            ("measured", "; ".join(measured) or f"no single step on {self.prices.gpu}"),
            ("ESTIMATED", "; ".join(estimates) or "none of these times"),
            ("Ray calls", f"what they take was measured: {self.messages}"),
        ]

    @property
    def choosing(self) -> float:
        """Share of the GPUs' work that only chooses seeds: previews, and samples of one stage that are not kept."""
        config = self.config
        explored = self.busy["explorers"] * explorers_in_all(config.fleet)
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
    arithmetic: Arithmetic, prices: PriceList, cluster: Cluster, controller: Orchestration, *, advise: bool = True
) -> Forecast:
    """An iteration of the run and, to `advise`, of the same run with a node more of each kind.

    Raises UserError if a figure is missing.
    """
    config = arithmetic.config
    # With what such cards decide; as it is if it does not fit them, or their memory is not known.
    made = (fitting.fitted(arithmetic, prices.card) if prices.card else None) or arithmetic
    cost = priced(made, prices, cluster)
    took = iteration(made.config, cost.stages, controller)
    changes = (*_larger(config, cluster.gpus_per_node), *_ahead(config)) if advise else ()
    options = []
    for changed, text in changes:
        other = forecast(describe(changed, arithmetic.facts), prices, cluster, controller, advise=False)
        options.append(Option(text=text, gpus=other.gpus, seconds=other.seconds))
    return Forecast(
        config=config,
        prices=prices,
        priced=cost,
        gpus=gpu_memory.gpus(config),
        parts=took.parts,
        busy=took.busy,
        options=tuple(options),
        messages=controller.conditions,
    )


def times(arithmetic: Arithmetic, cluster: Cluster, prices: PriceList) -> str:
    """The forecast's table on such a cluster. Raises UserError as `forecast`."""
    return paragraphs(forecast(arithmetic, prices, cluster, orchestration()).rows())


def _larger(config: Config, node: int) -> list[tuple[Config, str]]:
    """The same run with a node more of each kind."""
    fleet, learner = config.fleet, config.learner
    sizes = {"explorers": fleet.explorers.count + node, "regenerators": fleet.regenerators.count + node}
    ranks = {"learner.world_size": learner.world_size + node}
    if is_colocated(config.fleet):
        return [(config.changed({"fleet": resized(fleet, sizes)} | ranks), f"{node} more GPUs with one of each")]
    if is_one_stage(config):
        del sizes["regenerators"]
    return [
        *(
            (config.changed({"fleet": resized(fleet, {name: size})}), f"{node} more {name}")
            for name, size in sizes.items()
        ),
        (config.changed(ranks), f"{node} more learner ranks"),
    ]


def _ahead(config: Config) -> list[tuple[Config, str]]:
    """The same GPUs with `rollout.max_staleness` 1, if that is a different and allowed run."""
    ahead = config.changed({"rollout.max_staleness": 1})
    if config.rollout.max_staleness or any(staleness_problems(ahead)):
        return []
    return [(ahead, "exploring one iteration ahead (rollout.max_staleness 1)")]


def _spent(seconds: float) -> str:
    """Seconds for reading, with three digits: ``7.38 s``, from 100 s on ``9.33 min``, from two hours on ``2.5 h``."""
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
