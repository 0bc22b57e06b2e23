"""The folder of a run: where everything is, who may write it, and what a resumed run finds there."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch
from safetensors import safe_open

from solrl_ray.config.loading import to_yaml
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError
from solrl_ray.files import replace_file
from solrl_ray.journal import Journal
from solrl_ray.metrics import EvaluationMetrics
from solrl_ray.records import SampleGroup


class RunFolder:
    """Paths and formats of one run folder. Holds no state but the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        return cls(Path(config.run.root).expanduser() / config.run.name)

    # Who may write

    def create(self, config: Config, *, resume: bool) -> None:
        """Make the folder of a new run, or check that there is one to resume. Writes `config.yaml`.

        Raises:
            UserError: a new run into a folder that has one, a resume of a folder that has none, a folder in use,
                one that cannot be written, or less free disk space than `checkpoints.min_free_gb`.
        """
        begun = (self.path / "config.yaml").exists()
        if begun and not resume:
            raise UserError(
                f"run.name is {config.run.name!r}, but {self.path} already holds a run; "
                "continue it with --resume or choose another name with --set run.name=…"
            )
        if resume and not begun:
            raise UserError(f"there is nothing to resume: {self.path} holds no config.yaml")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            free_gb = shutil.disk_usage(self.path).free / 1e9
        except OSError as error:
            raise UserError(f"the run folder {self.path} cannot be written: {error.strerror}") from None
        if free_gb < config.checkpoints.min_free_gb:
            raise UserError(
                f"the disk of {self.path} has {free_gb:.2f} GB free; "
                f"checkpoints.min_free_gb asks for {config.checkpoints.min_free_gb:g} GB"
            )
        self.lock(seconds=20.0 if resume else 0.0)
        try:
            replace_file(self.path / "config.yaml", to_yaml(config).encode())
        except OSError as error:
            raise UserError(f"the run folder {self.path} cannot be written: {error.strerror}") from None

    def lock(self, *, seconds: float) -> None:
        """Claim the folder for this process. It is free again when the process ends, however it ends.

        Waits up to `seconds`: after a driver was killed, its cluster needs a moment to be gone.
        """
        file = (self.path / "lock").open("a+")
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    holder = file.read().strip() or "another process"
                    file.close()
                    raise UserError(f"the run folder {self.path} is in use by {holder}") from None
                time.sleep(0.2)
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        self._lock = file

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # What is where

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def embeddings(self) -> Path:
        return self.path / "embeddings"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    def journal(self, iteration: int) -> Journal:
        return Journal(self.path / "journal" / f"iteration-{iteration:06d}.jsonl")

    def checkpoint(self, updates: int) -> Path:
        return self.path / "checkpoints" / f"iteration-{updates:06d}"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(updates, folder) of all checkpoints, oldest first."""
        return sorted(
            (int(folder.name.removeprefix("iteration-")), folder)
            for folder in (self.path / "checkpoints").glob("iteration-*")
        )

    def prune(self, *, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints, and the samples of iterations that they contain."""
        for _, folder in self.checkpoints()[:-keep]:
            shutil.rmtree(folder)
        oldest = min((updates for updates, _ in self.checkpoints()), default=0)
        for folder in (self.path / "samples").glob("iteration-*"):
            if int(folder.name.removeprefix("iteration-")) < oldest:
                shutil.rmtree(folder)

    # Samples

    def save_group(self, group: SampleGroup) -> None:
        """Store a regenerated group, so that a resumed run need not make it again."""
        header = {
            "revision": group.revision,
            "indices": group.indices,
            "rewards": group.rewards,
            "seconds": group.seconds,
            "worker": group.worker,
            "stage_seconds": group.stage_seconds,
        }
        content = safetensors.torch.save({"latents": group.latents}, metadata={"group": json.dumps(header)})
        replace_file(self._group_path(group.iteration, group.prompt_id), content)

    def load_group(self, iteration: int, prompt_id: str) -> SampleGroup:
        """Read a stored group. Raises OSError or SafetensorError if it is missing or cut off."""
        with safe_open(self._group_path(iteration, prompt_id), framework="pt") as file:
            header = json.loads(file.metadata()["group"])
            latents: torch.Tensor = file.get_tensor("latents")
        return SampleGroup(
            iteration=iteration,
            revision=header["revision"],
            prompt_id=prompt_id,
            indices=tuple(header["indices"]),
            rewards=tuple(header["rewards"]),
            latents=latents,
            seconds=header["seconds"],
            worker=header["worker"],
            stage_seconds=header["stage_seconds"],
        )

    def _group_path(self, iteration: int, prompt_id: str) -> Path:
        return self.path / "samples" / f"iteration-{iteration:06d}" / f"{prompt_id}.safetensors"

    # Metrics

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Add one record and wait until it is on the disk."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def save_evaluation(self, metrics: EvaluationMetrics) -> None:
        """One evaluation as a file of its own."""
        path = self.evaluations / f"updates-{metrics.iteration:06d}-{metrics.policy}.json"
        replace_file(path, json.dumps(metrics.as_dict(), indent=1).encode())

    def read_metrics(self) -> list[dict[str, Any]]:
        """All records; a last line that was cut off is left out."""
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def rewind_metrics(self, updates: int) -> None:
        """Drop what was measured after `updates` updates: a resumed run measures it again."""
        kept = [
            record
            for record in self.read_metrics()
            if record["iteration"] < updates + (record["event"] == "evaluation")
        ]
        if self.metrics.exists():
            replace_file(self.metrics, "".join(json.dumps(r) + "\n" for r in kept).encode())
