"""Steps one after another: each measures and is reported at once; others outlive its failure."""

from __future__ import annotations

import gc
import math
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Measure:
    """A result of a step; with a limit it fails the step unless it holds."""

    name: str
    value: float | int | str | bool
    limit: str = ""
    """``at most 0.05``; empty if there is none."""
    why: str = ""
    """The reason of the limit."""
    holds: bool = True

    @property
    def shown(self) -> str:
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        return f"{self.value:.4g}" if isinstance(self.value, float) else f"{self.value}"


def at_most(name: str, value: float, limit: float, why: str) -> Measure:
    """NaN fails."""
    return Measure(name, value, f"at most {limit:g}", why, value <= limit)


def at_least(name: str, value: float, limit: float, why: str) -> Measure:
    """NaN fails."""
    return Measure(name, value, f"at least {limit:g}", why, value >= limit)


def above_zero(name: str, value: float, why: str) -> Measure:
    """NaN and infinity fail."""
    return Measure(name, value, "above 0", why, 0 < value < math.inf)


def is_true(name: str, value: bool, why: str) -> Measure:
    return Measure(name, value, "yes", why, value)


class Lacks(Exception):
    """This machine cannot do the step; the message says why."""


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    does: str
    """In a few words."""
    work: Callable[[], list[Measure]]
    """Raises `Lacks` if this machine cannot do it."""
    needs: tuple[str, ...] = ()
    """Steps that must have succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    step: str
    state: str
    """``ok``; ``FAILS``; ``lacks``: this machine cannot do it; ``skipped``: a step that it needs did not succeed."""
    seconds: float = 0.0
    peak_gb: float | None = None
    """Peak memory of the GPU, GB (10^9 bytes); None without one."""
    measures: Sequence[Measure] = ()
    reason: str = ""
    """Why it is not ok, in a sentence."""
    traceback: str = ""

    @property
    def line(self) -> str:
        """One line for the terminal."""
        spent = f"{self.seconds:.1f} s" + ("" if self.peak_gb is None else f", {self.peak_gb:.2f} GB")
        told = self.reason or "; ".join(f"{each.name} {each.shown}" for each in self.measures if each.limit)
        return f"{self.step:<24} {self.state:<8} {spent:<20} {told}".rstrip()


def run(steps: Sequence[Step], device: torch.device) -> Iterator[Outcome]:
    """The outcome of each step, as soon as it is known."""
    succeeded: set[str] = set()
    for step in steps:
        if missing := [name for name in step.needs if name not in succeeded]:
            reason = f"needs {' and '.join(missing)}, which did not succeed"
            yield Outcome(step=step.name, state="skipped", reason=reason)
            continue
        outcome = _done(step, device)
        if outcome.state == "ok":
            succeeded.add(step.name)
        yield outcome


def _done(step: Step, device: torch.device) -> Outcome:
    on_gpu = device.type == "cuda"
    free(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    measures, trace, started = list[Measure](), "", time.perf_counter()
    try:
        measures = step.work()
        if on_gpu:
            torch.cuda.synchronize(device)  # else its errors would be the next step's
        reason = "; ".join(f"{each.name} is {each.shown}, not {each.limit}" for each in measures if not each.holds)
        state = "FAILS" if reason else "ok"
    except Lacks as lacking:
        state, reason = "lacks", str(lacking)
    except Exception as error:  # any error: the report shows it, and the other steps go on
        state, reason = "FAILS", without_home(f"{type(error).__name__}: {' '.join(str(error).split())}")[:400]
        trace = "".join(traceback.format_exception(error))
        traceback.clear_frames(error.__traceback__)  # and with them GPU memory
    return Outcome(
        step=step.name,
        state=state,
        seconds=time.perf_counter() - started,
        peak_gb=torch.cuda.max_memory_allocated(device) / 1e9 if on_gpu else None,
        measures=measures,
        reason=reason,
        traceback=trace,
    )


def free(device: torch.device) -> None:
    """Free unused memory, and code compiled for models that are gone."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def without_home(text: str) -> str:
    """Replaces the user's home folder, which has their name, by ``~`` where a path begins, as set or resolved."""
    homes = {str(home) for home in (Path.home(), Path.home().resolve()) if home != Path("/")}
    for home in homes:
        # Not after a part of another path, nor before the rest of a longer name; a full stop may end a sentence.
        text = re.sub(rf"(?<![\w.~-]){re.escape(home)}(?![\w@+-]|\.+[\w-])", "~", text)
    return text
