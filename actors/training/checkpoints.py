"""When a run's checkpoints, LoRA files (`lora`, `lora_best`), summary and report are written."""

from __future__ import annotations

from pathlib import Path

from actors.monitoring.telemetry import Telemetry
from actors.training.learner_group import LearnerGroup
from actors.world import World
from solrl_ray import models
from solrl_ray.common.files import remove
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError, UserError
from solrl_ray.evaluation import stability
from solrl_ray.learning.state import LearnerState
from solrl_ray.policy.saving import save_lora
from solrl_ray.report.summary import summarize, write_summary
from solrl_ray.storage.checkpoints import Uploader, newest_state
from solrl_ray.storage.run_folder import RunFolder


class CheckpointWriter:
    def __init__(
        self, config: Config, folder: RunFolder, world: World, telemetry: Telemetry, learners: LearnerGroup
    ) -> None:
        self._config, self._folder, self._world, self._telemetry = config, folder, world, telemetry
        self._learners = learners
        upload = bool(config.checkpoints.upload)
        self._uploader = Uploader(folder.path, config.checkpoints, telemetry.message) if upload else None

    def newest(self) -> LearnerState | None:
        """The state of the newest checkpoint that verifies. Blocks."""
        return newest_state(self._folder.checkpoints(), self._folder.path)[1]

    async def save(self, state: LearnerState, updates: int) -> float:
        """Write the checkpoint from which a run resumes; from then on the iteration counts. Returns its seconds."""
        began, seconds = self._world.now(), self._config.fleet.deadlines.checkpoint
        await self._telemetry.written()  # so that the metrics of all iterations in a checkpoint are on the disk
        what = f"the checkpoint after {updates} updates in {self._folder.path} (fleet.deadlines.checkpoint)"
        await self._world.blocking(lambda: self._write(state, updates), what, seconds)
        self._learners.saved()
        if self._uploader is not None:
            self._uploader.submit(self._folder.checkpoint(updates), self._best)
        saved = self._world.now() - began
        nodes = await self._world.blocking(
            self._world.draining_nodes, "reading which nodes are leaving", self._config.fleet.deadlines.fetch
        )
        await self._learners.leave(nodes)
        return saved

    async def finish(self, seconds: float) -> None:
        """Write LoRA files, summary and report; then the run is done. `seconds`: its wall time."""
        deadlines = self._config.fleet.deadlines
        self._telemetry.state("writing the report", stage="report")
        what = "reading the last checkpoint"
        state = await self._world.blocking(self._complete, what, deadlines.checkpoint)
        summary = summarize(self._config, self._telemetry.iterations, self._telemetry.evaluations, seconds=seconds)
        await self._telemetry.written()

        def write() -> None:
            self._save_lora(self._folder.lora, state)
            self.save_best()
            write_summary(self._folder.path, summary)

        where = f"in {self._folder.path} (fleet.deadlines.checkpoint)"
        await self._world.blocking(write, f"writing LoRA files and summary {where}", deadlines.checkpoint)
        what, path = f"writing the report {where}", self._folder.path
        try:
            await self._world.blocking(lambda: self._world.write_report(path), what, deadlines.checkpoint)
        except Exception as error:  # the run is complete, whatever hinders its page
            self._telemetry.message(f"no report: {error}; `solrl report {path}` makes it")
        if self._uploader is not None:
            self._telemetry.state("copying the last checkpoints and the report")
            close, limit = self._uploader.close, deadlines.upload
            await self._world.blocking(lambda: close(seconds=limit), "the last copies", 2 * limit)
        await self._telemetry.close()

    def save_best(self) -> None:
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
        save_lora(folder, state.ema, model.lora, models.FAMILIES[model.family].convolutions)

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
        self._folder.prune(checkpoints.model_copy(update={"keep": checkpoints.keep + staleness}), self._best)
