"""Runs the steps one after another: each has a deadline and is reported at once; a failure does not stop the others."""

from __future__ import annotations

import gc
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from solrl_ray.common.deadlines import in_time
from solrl_ray.validation.outcomes import Lacks, Measure, Outcome, misses

_RESET_PEAK = "5"
"""Written to ``/proc/self/clear_refs``, it resets the peak of the resident memory (proc(5))."""


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    does: str
    work: Callable[[], list[Measure]]
    """Raises `Lacks` if this machine cannot do it."""
    needs: tuple[str, ...] = ()
    """Steps that must have succeeded."""


def run(steps: Sequence[Step], device: torch.device, seconds: float) -> Iterator[Outcome]:
    """The outcome of each step, as soon as it is known.

    Args:
        seconds: deadline of each step. A step that passes it is abandoned in its thread.
    """
    done: dict[str, str] = {}
    for step in steps:
        missing = [name for name in step.needs if done.get(name) != "ok"]
        outcome = _skipped(step, missing) if missing else _done(step, device, seconds)
        done[step.name] = outcome.state
        yield outcome


def _skipped(step: Step, missing: list[str]) -> Outcome:
    reason = f"needs {' and '.join(missing)}, which did not succeed"
    return Outcome(step=step.name, does=step.does, state="skipped", seconds=0.0, peak_gb=None, reason=reason)


def _done(step: Step, device: torch.device, seconds: float) -> Outcome:
    _reset_peak(device)
    started = time.perf_counter()

    def outcome(state: str, measures: Sequence[Measure] = (), reason: str = "", trace: str = "") -> Outcome:
        return Outcome(
            step=step.name,
            does=step.does,
            state=state,  # type: ignore[arg-type]
            seconds=time.perf_counter() - started,
            peak_gb=_peak_gb(device),
            measures=tuple(measures),
            reason=reason,
            traceback=trace,
        )

    def work() -> list[Measure]:
        found = step.work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return found

    try:
        measures = in_time(work, what=step.name, seconds=seconds, silent="it")
    except Lacks as lacking:
        return outcome("lacks", reason=str(lacking))
    except Exception as error:  # any error: the report shows it, and the other steps go on
        said = " ".join(str(error).split())
        return outcome("FAILS", reason=without_home(f"{type(error).__name__}: {said}")[:400], trace=_traceback(error))
    missed = misses(measures)
    return outcome("FAILS" if missed else "ok", measures, missed)


def _traceback(error: Exception) -> str:
    """With the home folder removed. Frees frames, and with them GPU memory."""
    text = "".join(traceback.format_exception(error))
    traceback.clear_frames(error.__traceback__)
    return without_home(text)


def without_home(text: str) -> str:
    """Replaces the user's home folder, which contains their name, by ``~`` at the beginning of a path, as set or
    resolved.
    """
    homes = {str(home) for home in (Path.home(), Path.home().resolve()) if home != Path("/")}
    for home in homes:
        # Not after a part of another path, nor before the rest of a longer name; a full stop may end a sentence.
        text = re.sub(rf"(?<![\w.~-]){re.escape(home)}(?![\w@+-]|\.+[\w-])", "~", text)
    return text


def free(device: torch.device) -> None:
    """Free unused memory, and code compiled for models that are gone."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _reset_peak(device: torch.device) -> None:
    free(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # the peak is then that of the whole process
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def _peak_gb(device: torch.device) -> float | None:
    """Peak since `_reset_peak`, GB (10^9 bytes)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    kib = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return kib[0] * 1024 / 1e9 if kib else None
