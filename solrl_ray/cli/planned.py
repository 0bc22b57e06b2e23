"""The plan of a checked run: a verdict, a short form and a whole one.

solrl plan            verdict, the main rows (the first clause of each), notes
solrl plan -v         verdict, all rows, notes
solrl train           four rows; `plan.txt` in the run folder has all of it
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from solrl_ray.cli import configured
from solrl_ray.cli.preflight import BEFORE, Run
from solrl_ray.config import strategies
from solrl_ray.config.loading import LoadedConfig
from solrl_ray.config.problems import counted, listed
from solrl_ray.errors import UserError
from solrl_ray.planning import fitting
from solrl_ray.planning.advice import advice
from solrl_ray.planning.arithmetic import Arithmetic, describe, paragraphs

if TYPE_CHECKING:
    from solrl_ray.planning.forecast import Forecast
    from solrl_ray.planning.prices import Cluster

PLAN_ROWS = (
    "run",
    "model",
    "rewards",
    "prompts",
    "explore",
    "select",
    "regenerate",
    "learn",
    "evaluate",
    "fleet",
    "time",
)
TRAIN_ROWS = ("run", "explore", "learn")
TRAIN_NOTES = 2
"""Notes and warnings that `solrl train` prints; `plan.txt` has the others."""
WHOLE = {"run": 3, "model": 2}
"""Clauses of a row in the short form, if not one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The figures of a run: its counts, memory and time."""

    arithmetic: Arithmetic
    verdict: str
    """One line: whether it fits, how long it takes, the most memory that one GPU holds."""
    rows: tuple[tuple[str, str], ...]
    """Name and text, in the order in which they are printed."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    problem: UserError | None = None
    """Why it does not fit the named GPU, and what would help."""
    fits: bool | None = None
    """None if no GPU was named, or its memory or the model's is unknown."""
    hours: float | None = None
    """All iterations, without start and evaluations; None if the model has no measured times."""
    peak: int | None = None
    """Bytes that the fullest GPU holds at most, estimated; None if unknown or without GPUs."""

    def whole(self) -> str:
        """Verdict, all rows, notes and warnings."""
        marked = [*(f"note: {note}" for note in self.notes), *(f"warning: {words}" for words in self.warnings)]
        return "\n".join([self.verdict, paragraphs(list(self.rows)), *marked])

    def short(self) -> str:
        """Verdict, the first clause of the main rows, and notes; what is missing on this machine is one note."""
        return "\n".join([self.verdict, self._main(PLAN_ROWS), *(f"note: {note}" for note in self._short_notes())])

    def start(self, file: str) -> str:
        """The few lines that `solrl train` prints besides the warnings; `file` has the whole plan."""
        shown = max(0, TRAIN_NOTES - len(self.warnings))
        left = len(self.notes[shown:])
        more = f" ({counted(left, 'more note')})" if left else ""
        notes = [f"note: {note}" for note in self.notes[:shown]]
        return "\n".join([self._main(TRAIN_ROWS), *notes, paragraphs([("plan", f"{file}{more}")])])

    def _main(self, names: tuple[str, ...]) -> str:
        rows = {name: text.split(" · ") for name, text in self.rows}
        return paragraphs([(name, " · ".join(rows[name][: WHOLE.get(name, 1)])) for name in names if name in rows])

    def _short_notes(self) -> list[str]:
        missing = [note.removeprefix(BEFORE).split()[0] for note in self.notes if note.startswith(BEFORE)]
        if len(missing) < 2:
            return list(self.notes)
        others = [note for note in self.notes if not note.startswith(BEFORE)]
        return [*others, f"{BEFORE}{listed(missing)} are not on this machine (`solrl plan -v` has their places)"]


def on_cluster(loaded: LoadedConfig, cluster: Cluster) -> LoadedConfig:
    """The configuration on such GPUs: ``rollout.explore.precision: auto`` is replaced by their best tier.

    Raises UserError if the GPU cannot compute the previews.
    """
    from solrl_ray.planning.prices import price_list

    prices = price_list(cluster.gpu)
    configured.check_tier(loaded, prices.gpu, prices.fastest)
    return replace(loaded, config=configured.on_card(loaded.config, prices.fastest))


def planned(run: Run, cluster: Cluster | None = None) -> Planned:
    """The plan of a run that has passed `preflight.model`; on the GPUs of `cluster`, whether it fits and how long it
    takes.
    """
    from solrl_ray.planning.forecast import forecast
    from solrl_ray.planning.prices import Unpriced, orchestration, price_list

    prices = price_list(cluster.gpu) if cluster else None
    card = prices.device if prices else None
    assert run.facts is not None  # of `preflight.model`
    config = fitting.with_activation_memory(run.config, run.facts, card) if card else run.config
    arithmetic = describe(
        config, run.facts, train_prompts=len(run.train) or None, heldout_prompts=len(run.heldout) or None
    )
    rows = [row for row in arithmetic.rows() if not prices or row[0] != "time"] + fitting.rows(arithmetic, card)
    notes, warnings = (*run.notes, *advice(config)), tuple(strategies.warnings(config))
    peak = fitting.peak(arithmetic) if run.facts.memory_is_known else 0
    plan = Planned(arithmetic=arithmetic, verdict="", rows=(), notes=notes, warnings=warnings, peak=peak or None)
    if card and peak:
        try:
            fits = fitting.sentence(arithmetic, card)
        except UserError as error:
            least = fitting.least_peak(arithmetic)
            verdict = (
                f"does not fit: peak {least / 1e9:.3g} GB, and {card.usable / 1e9:.3g} of the "
                f"{card.memory / 1e9:.3g} GB of {card.name} is usable"
            )
            if changes := fitting.fitting_changes(arithmetic, card):
                verdict += f"; it fits with {fitting.settings(changes)}"
            return replace(plan, verdict=verdict, rows=tuple(rows), problem=error, fits=False, peak=least)
        rows.append(("fits", fits))
        made = fitting.fitted(arithmetic, card)
        plan = replace(plan, fits=True, peak=fitting.peak(made or arithmetic))
    took: Forecast | None = None
    if cluster and prices:
        try:
            took = forecast(arithmetic, prices, cluster, orchestration())
            rows += took.rows()
            plan = replace(plan, hours=took.seconds * config.run.iterations / 3600)
        except Unpriced as error:
            rows.append(("time", f"shown after the first iteration, by its pace: {error}"))
    return replace(plan, rows=tuple(rows), verdict=_verdict(plan, took, card))


def _verdict(plan: Planned, took: Forecast | None, card: fitting.Gpu | None) -> str:
    iterations = counted(plan.arithmetic.config.run.iterations, "iteration")
    where = "" if took is None else f"about {_time(plan.hours)} for {iterations} on {took.gpus} × {took.prices.gpu}"
    if not plan.arithmetic.gpus:
        return where or f"needs no GPU: {iterations} on CPUs"
    if plan.peak is None:
        return "; ".join(filter(None, [where, "memory unknown: no measurements of this model family"]))
    if card is None:
        hint = "" if took else "; --gpu NAME says whether it fits and how long it takes"
        return "; ".join(filter(None, [where, f"peak {plan.peak / 1e9:.3g} GB per GPU (estimated){hint}"]))
    peak = f"peak {plan.peak / 1e9:.3g} of {card.memory / 1e9:.3g} GB"
    return f"fits: {where}; {peak}" if where else f"fits: {peak} on {card.name}; no timings for this model"


def _time(hours: float | None) -> str:
    """``57 min``, from two hours on ``2.8 h``."""
    assert hours is not None
    if hours >= 2:
        return f"{hours:.1f} h"
    return f"{60 * hours:.0f} min" if hours > 0.2 else f"{60 * hours:.2g} min"
