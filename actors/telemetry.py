"""What is known of a run while it goes on: progress for the terminal, metrics.jsonl, TensorBoard, attestations."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path

import torch

from solrl_ray.config.schema import Config
from solrl_ray.files import replace_file
from solrl_ray.metrics import EvaluationMetrics, IterationMetrics, Progress
from solrl_ray.records import Attestation
from solrl_ray.report.tensorboard import TensorBoardWriter
from solrl_ray.run_folder import RunFolder

MESSAGES = 8
"""Notable events that the live view can show."""


class Telemetry:
    """Written by the controller's loop, read by whoever asks for `progress` from another thread."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._state = "starting"
        self._iteration = 0
        self._stages: dict[str, tuple[int, int]] = {}
        self._workers: dict[str, str] = {}
        self._messages: deque[str] = deque(maxlen=MESSAGES)
        self._attestations: dict[tuple[str, str, str], Attestation] = {}
        """By worker, device and score class."""
        self._writer: TensorBoardWriter | None = None
        self.iterations: list[IterationMetrics] = []
        self.evaluations: list[EvaluationMetrics] = []
        self._measured_here = 0

    def resume(self, iterations: list[IterationMetrics], evaluations: list[EvaluationMetrics]) -> None:
        """Take over what the run measured and which workers it had before; opens the TensorBoard events."""
        self.iterations, self.evaluations = list(iterations), list(evaluations)
        self._writer = TensorBoardWriter(self._folder.path / "tensorboard", first_iteration=len(iterations))
        self._iteration = len(iterations)
        if self._attestations_file.exists():
            for values in json.loads(self._attestations_file.read_text()):
                self._keep(Attestation(**values))

    def state(self, words: str) -> None:
        """What is going on now."""
        with self._lock:
            self._state = words

    def begin_iteration(self, iteration: int) -> None:
        with self._lock:
            self._iteration = iteration
            self._stages = {}

    def stage(self, name: str, done: int, total: int) -> None:
        with self._lock:
            self._stages[name] = (done, total)

    def workers(self, states: dict[str, str]) -> None:
        with self._lock:
            self._workers = states

    def message(self, text: str) -> None:
        """A notable event: a lost worker, a replacement, a requeued unit."""
        with self._lock:
            self._messages.append(text)

    def attested(self, attestation: Attestation) -> None:
        """Keep what a worker really runs, for the report (design law 5)."""
        self._keep(attestation)
        content = json.dumps([asdict(a) for _, a in sorted(self._attestations.items())], indent=2)
        replace_file(self._attestations_file, content.encode())

    def _keep(self, attestation: Attestation) -> None:
        """A name may come again, as after a resume; what it ran before stays, unless it was the same."""
        self._attestations[attestation.worker, attestation.device, attestation.score_class] = attestation

    @property
    def _attestations_file(self) -> Path:
        return self._folder.path / "attestations.json"

    def iteration(self, metrics: IterationMetrics) -> None:
        self._folder.append_metrics(metrics.as_dict())
        with self._lock:
            self.iterations.append(metrics)
            self._measured_here += 1
        if self._writer is not None:
            self._writer.iteration(metrics)

    def evaluation(self, metrics: EvaluationMetrics, pictures: list[list[torch.Tensor]]) -> None:
        self._folder.append_metrics(metrics.as_dict())
        with self._lock:
            self.evaluations.append(metrics)
        if self._writer is not None:
            self._writer.evaluation(metrics, pictures)

    def progress(self) -> Progress:
        with self._lock:
            return Progress(
                run=self._config.run.name,
                state=self._state,
                iteration=self._iteration,
                iterations=self._config.run.iterations,
                stages=dict(self._stages),
                train_rewards=tuple(m.reward_mean for m in self.iterations),
                heldout=tuple((e.iteration, e.policy, e.reward_mean, e.reward_stderr) for e in self.evaluations),
                spearman=tuple(m.spearman for m in self.iterations),
                workers=dict(self._workers),
                messages=tuple(self._messages),
                elapsed=time.monotonic() - self._started,
                remaining=self._remaining(),
            )

    def _remaining(self) -> float | None:
        """By the pace of this process's iterations, plus a last evaluation as long as the first one."""
        if not self._measured_here:
            return None
        recent = [m.seconds["total"] for m in self.iterations[-min(5, self._measured_here) :]]
        left = self._config.run.iterations - len(self.iterations)
        last = next((e.seconds for e in self.evaluations if e.policy == "base"), 0.0)
        return left * sum(recent) / len(recent) + last

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
