"""How a run is by its folder alone, when nobody is at work in it."""

from __future__ import annotations

from pathlib import Path

from solrl_ray.common.deadlines import in_time
from solrl_ray.common.files import READ_SECONDS
from solrl_ray.metrics.records import Progress, measured_seconds
from solrl_ray.report.data import read_run


def stored_progress(folder: Path) -> Progress:
    """The snapshot that a run folder gives. Raises UserError as `read_run` does, RunError if its disk hangs."""
    run = in_time(lambda: read_run(folder), what=f"reading {folder}", seconds=READ_SECONDS)
    done, planned = len(run.iterations), run.config.run.iterations
    return Progress(
        run=run.config.run.name,
        state="done" if run.finished else "not running; --resume goes on with it",
        iteration=done,
        iterations=planned,
        stages={"iterations": (done, planned)},
        train_rewards=tuple(record.reward_mean for record in run.iterations),
        heldout=tuple((e.iteration, e.policy, e.reward_mean, e.reward_stderr) for e in run.evaluations),
        spearman=tuple(record.spearman for record in run.iterations if record.spearman is not None),
        elapsed=run.summary.seconds if run.summary else measured_seconds(run.iterations, run.evaluations),
    )
