"""When a run's checkpoints, LoRA files (`lora`, `lora_best`), summary and report are written, and what follows a
collapse: nothing, the end of the run, or the best evaluated checkpoint once more.

::

    evaluation of revision t ─► update t + 1 ─► [ has it collapsed? ] ─► revision t + 1
                                                     └─ rollback: the state of the best checkpoint is revision t + 1

The evaluation of revision t has ended with update t + 1, whatever the placement. So the decision is always made there.
Nothing is published twice, iterations and revisions are counted on, and the checkpoint after t + 1 updates is the one
gone back to: a run that is killed before it decides again by the same records, and one killed after it goes on from it.
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
    """Writes what a run keeps of its policies, and reads the checkpoint that it goes back to after a collapse."""

    def __init__(
        self, config: Config, folder: RunFolder, world: World, telemetry: Telemetry, learners: LearnerGroup
    ) -> None:
        self._config, self._folder, self._world, self._telemetry = config, folder, world, telemetry
        self._learners = learners
        self._on_disk = partial(on_disk, world, config, folder.path)
        upload = bool(config.checkpoints.upload)
        self._uploader = Uploader(folder.path, config.checkpoints, telemetry.message) if upload else None

    def newest(self) -> LearnerState | None:
        """The state of the newest checkpoint that verifies. Blocks."""
        return newest_state(self._folder.checkpoints(), self._folder.path)[1]

    async def save(self, state: LearnerState, updates: int) -> float:
        """Write the checkpoint from which a run resumes; from then on the iteration counts. Returns its seconds."""
        began = self._world.now()
        await self._telemetry.written()  # so that the metrics of all iterations in a checkpoint are on the disk
        await self._on_disk(lambda: self._write(state, updates), f"the checkpoint after {updates} updates")
        self._learners.saved()
        if self._uploader is not None:
            self._uploader.submit(self._folder.checkpoint(updates), self._best)
        saved = self._world.now() - began
        nodes = await self._world.blocking(
            self._world.draining_nodes, "reading which nodes are leaving", self._config.fleet.deadlines.fetch
        )
        await self._learners.leave(nodes)
        return saved

    @property
    def low_fidelity(self) -> str:
        """Why the run must end now, because previews rank badly (`fidelity.on_low`); empty if it need not."""
        return low_fidelity.stop(self._config, self._telemetry.iterations)

    async def gone_back_to(self, updates: int) -> tuple[int, LearnerState] | None:
        """If the run goes back: updates of the best evaluated checkpoint, and its state, as the one after `updates`.

        Call when update number `updates` is made and not published. Raises RunError if the run ends, or if there is no
        such checkpoint any more.
        """
        asked = self._config.run.on_collapse
        newest = next((each for each in reversed(self._telemetry.evaluations) if each.policy == "ema"), None)
        if asked == "warn" or newest is None or not newest.fall or newest.iteration != updates - 1:
            return None
        said = stability.describe_fall(newest)
        if asked == "stop":
            await self._on_disk(self._save_best, "writing lora_best")
            raise RunError(
                f"run.on_collapse is stop: {said}. The best trained policy is in {self._folder.lora_best}; a smaller "
                "learner.optimizer.lr may hold, or go on with --resume and run.on_collapse=warn"
            )
        best = int(newest.fall["best"])
        try:
            state = await self._on_disk(
                lambda: LearnerState.load(self._folder.checkpoint(best)), f"reading the checkpoint after {best} updates"
            )
        except UserError as error:
            raise RunError(
                f"run.on_collapse is rollback, and {said}, but that checkpoint cannot be read: {error}; go on with "
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
        """Write LoRA files, summary and report; then the run is done. `seconds`: its wall time."""
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
        except Exception as error:  # the run is complete, whatever hinders its page
            self._telemetry.message(f"no report: {error}; `solrl report {path}` makes it")
        if self._uploader is not None:
            self._telemetry.state("copying the last checkpoints and the report")
            close, limit = self._uploader.close, self._config.fleet.deadlines.upload
            await self._world.blocking(lambda: close(seconds=limit), "the last copies", 2 * limit)
        await self._telemetry.close()

    def _save_best(self) -> None:
        """Write ``lora_best``, the weights of the best evaluated checkpoint. Blocks.

        If that cannot be read there is none, which the user is told: the run is complete without it.
        """
        top = stability.best(self._telemetry.evaluations, trained=True)
        if top is None:
            return
        try:
            self._save_lora(self._folder.lora_best, LearnerState.load(self._folder.checkpoint(top.iteration)))
        except UserError as error:
            remove(self._folder.lora_best)
            self._telemetry.message(f"no lora_best, of the policy after {top.iteration} updates: {error}")

    def _save_lora(self, folder: Path, state: LearnerState) -> None:
        model = self._config.model
        save_lora(folder, state.ema, model.lora, models.FAMILIES[model.family].CONVOLUTIONS)

    @property
    def _best(self) -> frozenset[int]:
        """Updates of the best evaluations: of the trained policy, and with the base model among them."""
        found = [stability.best(self._telemetry.evaluations, trained=trained) for trained in (True, False)]
        return frozenset(each.iteration for each in found if each is not None)

    def _complete(self) -> LearnerState:
        """The state after the last update, from the disk: on a shared GPU it may not be the learners' turn.

        Raises RunError if it does not verify.
        """
        state, last = self.newest(), self._config.run.iterations
        if state is None or state.updates != last:
            raise RunError(f"the checkpoint after {last} updates in {self._folder.path} is damaged; resume the run")
        return state

    def _write(self, state: LearnerState, updates: int) -> None:
        state.save(self._folder.checkpoint(updates))
        # With staleness, resuming needs the checkpoint before as well; keep one more in case the newest is damaged.
        checkpoints, staleness = self._config.checkpoints, self._config.rollout.max_staleness
        self._folder.prune(checkpoints.changed({"keep": checkpoints.keep + staleness}), self._best)
