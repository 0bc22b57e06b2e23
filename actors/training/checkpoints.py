"""Writes checkpoints, LoRA files (`lora`, `lora_best`), summary and report of a run. Handles a collapse of the policy
(`run.on_collapse`): a warning, the end of the run, or a rollback to the best evaluated checkpoint.

::

    evaluation of revision t ─► update t + 1 ─► [ collapsed at t? ] ─► revision t + 1
                                                     └─ rollback: revision t + 1 is the state of the best checkpoint

The decision is made after update t + 1, because the evaluation of revision t has always ended by then, for every
placement. After a rollback, iterations and revisions keep counting, and no revision is published twice. The checkpoint
after t + 1 updates has the restored state. If the run is killed before this checkpoint is written, it decides again
from the same records; if later, it resumes from the restored state.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from actors.monitoring.telemetry import Telemetry
from actors.training.learner_group import LearnerGroup
from actors.world import World, on_disk
from solrl_ray import models
from solrl_ray.common.files import remove
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError, UserError
from solrl_ray.evaluation import stability
from solrl_ray.learning.state import LearnerState
from solrl_ray.objectives.schedules import ROLLBACK_STEP
from solrl_ray.policy.saving import save_lora
from solrl_ray.report.summary import summarize, write_summary
from solrl_ray.rollout import low_fidelity
from solrl_ray.storage.checkpoints import Uploader, newest_state
from solrl_ray.storage.run_folder import RunFolder


class CheckpointWriter:
    """Writes checkpoints and results, and reads the checkpoint that a run returns to after a collapse."""

    def __init__(
        self, config: Config, folder: RunFolder, world: World, telemetry: Telemetry, learners: LearnerGroup
    ) -> None:
        self._config, self._folder, self._world, self._telemetry = config, folder, world, telemetry
        self._learners = learners
        self._on_disk = partial(on_disk, world, config, folder.path)
        upload = bool(config.checkpoints.upload)
        self._uploader = Uploader(folder.path, config.checkpoints, telemetry.message) if upload else None

    def newest(self) -> LearnerState | None:
        """State of the newest undamaged checkpoint. Blocks."""
        return newest_state(self._folder.checkpoints(), self._folder.path)[1]

    async def save(self, state: LearnerState, updates: int) -> float:
        """Write the checkpoint after `updates` updates, from which a run resumes. Returns the seconds it took.

        The iteration counts once the checkpoint is on disk. Afterwards, moves the learner group off draining nodes.
        """
        began = self._world.now()
        await self._telemetry.written()  # first, so that the disk has the metrics of all iterations in a checkpoint
        await self._on_disk(lambda: self._write(state, updates), f"the checkpoint after {updates} updates")
        self._learners.saved()
        if self._uploader is not None:
            self._uploader.submit(self._folder.checkpoint(updates), self._best)
        saved = self._world.now() - began
        nodes = await self._world.blocking(
            self._world.draining_nodes, "reading which nodes are draining", self._config.fleet.deadlines.fetch
        )
        await self._learners.leave(nodes)
        return saved

    @property
    def low_fidelity(self) -> str:
        """Why the run must end now because of low rank fidelity (`fidelity.on_low`); empty if it continues."""
        return low_fidelity.stop(self._config, self._telemetry.iterations)

    async def gone_back_to(self, updates: int) -> tuple[int, LearnerState] | None:
        """The checkpoint to return to, if the policy has collapsed and `run.on_collapse` is ``rollback``; else None.

        Returns the number of updates of the best evaluated checkpoint, and its state, renumbered as the one after
        `updates`.

        Call after update number `updates` and before its publication. Raises RunError if `run.on_collapse` is ``stop``,
        or if the best checkpoint cannot be read.
        """
        action = self._config.run.on_collapse
        newest = next((each for each in reversed(self._telemetry.evaluations) if each.policy == "ema"), None)
        if action == "warn" or newest is None or not newest.fall or newest.iteration != updates - 1:
            return None
        fall = stability.describe_fall(newest)
        if action == "stop":
            await self._on_disk(self._save_best, "writing lora_best")
            raise RunError(
                f"run.on_collapse is stop: {fall}. The best trained policy is in {self._folder.lora_best}; a smaller "
                "learner.optimizer.lr may be stable, or continue with --resume and run.on_collapse=warn"
            )
        best = int(newest.fall["best"])
        try:
            state = await self._on_disk(
                lambda: LearnerState.load(self._folder.checkpoint(best)), f"reading the checkpoint after {best} updates"
            )
        except UserError as error:
            raise RunError(
                f"run.on_collapse is rollback, and {fall}, but that checkpoint cannot be read: {error}; continue with "
                "--resume and run.on_collapse=warn"
            ) from error
        rollbacks = 1 + sum(record.rollback is not None for record in self._telemetry.iterations)
        self._telemetry.message(
            f"the run goes back to the policy after {best} updates, with {ROLLBACK_STEP**rollbacks:g} of the "
            "configured learning rate",
            "collapse",
        )
        return best, replace(state, updates=updates, rollbacks=rollbacks)

    async def finish(self, seconds: float) -> None:
        """Write LoRA files, summary and report, and finish the run. `seconds`: wall time of the whole run."""
        self._telemetry.state("writing the report", stage="report")
        state = await self._on_disk(self._complete, "reading the last checkpoint")
        summary = summarize(self._config, self._telemetry.iterations, self._telemetry.evaluations, seconds=seconds)
        await self._telemetry.written()

        def write() -> None:
            self._save_lora(self._folder.lora, state)
            self._save_best()
            write_summary(self._folder.path, summary)

        await self._on_disk(write, "writing LoRA files and summary")
        path = self._folder.path
        try:
            await self._on_disk(lambda: self._world.write_report(path), "writing the report")
        except Exception as error:  # any error: the run is complete even without its report
            self._telemetry.message(f"the report was not written: {error}; `solrl report {path}` writes it")
        if self._uploader is not None:
            self._telemetry.state("copying the last checkpoints and the report")
            close, limit = self._uploader.close, self._config.fleet.deadlines.upload
            await self._world.blocking(lambda: close(seconds=limit), "the last copies", 2 * limit)
        await self._telemetry.close()

    def _save_best(self) -> None:
        """Write ``lora_best``, the weights of the best evaluated checkpoint. Blocks.

        If that checkpoint cannot be read, the file is left out and a message says so: the run is complete without it.
        """
        top = stability.best(self._telemetry.evaluations, trained=True)
        if top is None:
            return
        try:
            self._save_lora(self._folder.lora_best, LearnerState.load(self._folder.checkpoint(top.iteration)))
        except UserError as error:
            remove(self._folder.lora_best)
            self._telemetry.message(f"no lora_best for the policy after {top.iteration} updates: {error}")

    def _save_lora(self, folder: Path, state: LearnerState) -> None:
        model = self._config.model
        save_lora(folder, state.ema, model.lora, models.FAMILIES[model.family].CONVOLUTIONS)

    @property
    def _best(self) -> frozenset[int]:
        """Updates of the best evaluations: among trained policies, and among all policies including the base model."""
        best = [stability.best(self._telemetry.evaluations, trained=trained) for trained in (True, False)]
        return frozenset(each.iteration for each in best if each is not None)

    def _complete(self) -> LearnerState:
        """The state after the last update, read from disk: on a shared GPU, another role may have the memory.

        Raises RunError if the checkpoint is damaged.
        """
        state, last = self.newest(), self._config.run.iterations
        if state is None or state.updates != last:
            raise RunError(f"the checkpoint after {last} updates in {self._folder.path} is damaged; resume the run")
        return state

    def _write(self, state: LearnerState, updates: int) -> None:
        state.save(self._folder.checkpoint(updates))
        # With staleness, resuming also needs the previous checkpoint. One more is kept in case the newest is damaged.
        checkpoints, staleness = self._config.checkpoints, self._config.rollout.max_staleness
        self._folder.prune(checkpoints.changed({"keep": checkpoints.keep + staleness}), self._best)
