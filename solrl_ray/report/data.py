"""Reads a run folder into records, for reports, for `solrl push`, and for `solrl status` of a run that is not live."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from solrl_ray.common.checked_json import as_record, parse, read_record
from solrl_ray.common.deadlines import in_time
from solrl_ray.common.files import READ_SECONDS, read_regular
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError
from solrl_ray.evaluation import stability
from solrl_ray.evaluation.paired_gain import PairedGain, paired_gain
from solrl_ray.metrics.records import (
    EVENTS_SHOWN,
    EvaluationMetrics,
    Event,
    IterationMetrics,
    Progress,
    measured_seconds,
)
from solrl_ray.records import Attestation
from solrl_ray.report.grids import REFERENCE, PictureKey, picture_paths
from solrl_ray.report.summary import Summary, find_evaluation
from solrl_ray.storage.continuation import FILE, check_format
from solrl_ray.storage.run_folder import SUMMARY_FILE, RunFolder, Start

ATTESTATIONS_FILE = "attestations.json"
NOT_RUNNING = "not running"
STARTING = "starting: waiting for its cluster or its controller"
_SHOWN = {"base": "base", "final": "ema", "real": "real"}
"""Name in reports → policy of the evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Contents of a run folder, except for the images, which stay on disk. All outputs are functions of this record."""

    folder: Path
    config: Config
    config_text: str
    starts: tuple[Start, ...]
    """Commands that started or resumed the run, oldest first."""
    iterations: tuple[IterationMetrics, ...]
    """Metrics in iteration order. For an iteration that was repeated after a resume, the last record."""
    evaluations: tuple[EvaluationMetrics, ...]
    """Evaluations, ordered by updates, then policy."""
    attestations: tuple[Attestation, ...]
    """Attestations of the workers, ordered by worker."""
    events: tuple[Event, ...]
    """All events, oldest first."""
    summary: Summary | None
    """Summary of the finished run; None if the run has not ended, or was extended since."""

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def shown(self) -> dict[str, EvaluationMetrics]:
        """The newest evaluation of each policy that reports show: ``base``, ``final`` and ``real``, if evaluated."""
        newest = {name: find_evaluation(self.evaluations, policy) for name, policy in _SHOWN.items()}
        return {name: record for name, record in newest.items() if record}

    @property
    def pictures(self) -> dict[str, dict[PictureKey, Path]]:
        """Name in `shown` → files of its images (empty if the evaluation kept none); also ``reference``, if any."""
        folder = RunFolder(self.folder).evaluations
        references = picture_paths(RunFolder(self.folder).references)
        return ({REFERENCE: references} if references else {}) | {
            name: picture_paths(folder / f"updates-{record.iteration:06d}-{record.policy}")
            for name, record in self.shown.items()
        }

    @property
    def gain(self) -> PairedGain | None:
        """Gain by training, paired over prompts; None before the trained policy was evaluated."""
        shown = self.shown
        return paired_gain(shown["base"], shown["final"]) if {"base", "final"} <= shown.keys() else None

    def at_best(self) -> RunData:
        """The finished run as if it had ended with its best evaluated policy, whose weights are in ``lora_best``.

        Raises UserError if the run has not ended, or if an older version wrote its summary without naming a best
        policy.
        """
        if self.summary is None or self.summary.best_updates is None:
            raise UserError(
                f"{self.folder} names no best evaluated policy: the run has not ended, or an older version "
                "wrote its summary. Leave out --best to take the last policy."
            )
        best = self.summary.best_updates
        digest = self.iterations[best - 1].lora_digest if best else self.config.run.init_digest
        return replace(
            self,
            evaluations=tuple(e for e in self.evaluations if e.policy != "ema" or e.iteration <= best),
            summary=replace(self.summary, iterations=best, lora_digest=digest),
        )


def read_run(folder: Path) -> RunData:
    """Read the folder of a run, finished or not.

    Raises UserError if `folder` is not a run folder, has another format, or has a damaged file, which the error names.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a run folder: there is no such folder.")
    files = RunFolder(folder)
    missing = [path.name for path in (folder / FILE, files.metrics) if not path.is_file()]
    if missing:
        raise UserError(f"{folder} is not the folder of a run that has begun: it has no {' and no '.join(missing)}.")
    check_format(folder)
    records = files.read_metrics()
    iterations = {record.iteration: record for record in records if isinstance(record, IterationMetrics)}
    evaluations = {(r.iteration, r.policy): r for r in records if isinstance(r, EvaluationMetrics)}
    config = load([folder / FILE])
    summary = read_summary(folder) if (folder / SUMMARY_FILE).is_file() else None
    return RunData(
        folder=folder,
        config=config,
        config_text=(folder / FILE).read_text(encoding="utf-8"),
        starts=files.starts(),
        iterations=tuple(iterations[number] for number in sorted(iterations)),
        evaluations=tuple(evaluations[key] for key in sorted(evaluations)),
        attestations=read_attestations(folder / ATTESTATIONS_FILE),
        events=files.read_events(),
        summary=summary if summary and summary.iterations == config.run.iterations else None,
    )


def stored_progress(folder: Path) -> Progress:
    """Progress of a run from its folder alone, when no process is working on it.

    Raises the errors of `read_run`, except for a run that is starting or that ended while starting. Raises RunError if
    the disk hangs.
    """
    files = RunFolder(folder)
    if (folder / FILE).is_file() and not files.metrics.is_file():
        return in_time(lambda: _start_progress(files), what=f"reading {folder}", seconds=READ_SECONDS)
    run = in_time(lambda: read_run(folder), what=f"reading {folder}", seconds=READ_SECONDS)
    done, planned = len(run.iterations), run.config.run.iterations
    return Progress(
        run=run.config.run.name,
        state="done" if run.finished else STARTING if files.lock.held else NOT_RUNNING,
        iteration=done,
        iterations=planned,
        stages={"iterations": (done, planned)},
        train_rewards=tuple(record.reward_mean for record in run.iterations),
        heldout=tuple((e.iteration, e.policy, e.reward_mean, e.reward_stderr) for e in run.evaluations),
        spearman=tuple(record.spearman for record in run.iterations if record.spearman is not None),
        events=run.events[-EVENTS_SHOWN:],
        alarm=stability.alarm(run.iterations, run.evaluations),
        elapsed=run.summary.seconds if run.summary else measured_seconds(run.iterations, run.evaluations),
    )


def _start_progress(files: RunFolder) -> Progress:
    """Progress of a run that has no metrics yet."""
    check_format(files.path)
    config, starts = load([files.path / FILE]), files.starts()
    commands = [
        Event(time=start.when, iteration=0, kind="note", what=f"started on {start.host} with: {start.command}")
        for start in starts[-1:]
    ]
    ended = NOT_RUNNING if files.begun else f"{NOT_RUNNING}: it ended while it was starting, and nothing was trained"
    return Progress(
        run=config.run.name,
        state=STARTING if files.lock.held else ended,
        iteration=0,
        iterations=config.run.iterations,
        events=(*commands, *files.read_events()[1 - EVENTS_SHOWN :]),
    )


def read_summary(folder: Path) -> Summary:
    """Read the summary of a run. Raises UserError if it is missing, is not JSON or lacks a field."""
    path, fix = folder / SUMMARY_FILE, "remove it, and solrl train --resume writes it again"
    if not path.is_file():
        raise UserError(f"{folder} has no {SUMMARY_FILE}: the run has not ended yet.")
    try:
        return as_record(Summary, parse(read_regular(path)), f"{path} ({fix})")
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {fix}.") from error


def read_attestations(path: Path) -> tuple[Attestation, ...]:
    """Read the attestations of a run, ordered by worker; empty if the file is missing. Raises UserError if it is
    damaged.
    """
    if not path.is_file():
        return ()
    return tuple(sorted(read_record(path, list[Attestation], "remove it"), key=lambda record: record.worker))
