"""What follows a collapse: nothing, the end of the run, or the best evaluated checkpoint once more.

::

    evaluation of revision t ─► update t + 1 ─► [ has it collapsed? ] ─► revision t + 1
                                                     └─ rollback: the state of the best checkpoint is revision t + 1

The evaluation of revision t has ended with update t + 1, whatever the placement. So the decision is always made there.
Nothing is published twice, iterations and revisions are counted on, and the checkpoint after t + 1 updates is the one
gone back to: a run that is killed before it decides again by the same records, and one killed after it goes on from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actors.monitoring.telemetry import Telemetry
from actors.world import World
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError, UserError
from solrl_ray.evaluation import stability
from solrl_ray.learning.state import LearnerState
from solrl_ray.objectives.schedules import ROLLBACK_STEP
from solrl_ray.storage.run_folder import RunFolder


class CollapseBrake:
    def __init__(
        self, config: Config, folder: RunFolder, world: World, telemetry: Telemetry, save_best: Callable[[], None]
    ) -> None:
        """`save_best` writes ``lora_best``; blocks."""
        self._config, self._folder, self._world, self._telemetry = config, folder, world, telemetry
        self._save_best = save_best

    async def gone_back_to(self, updates: int) -> tuple[int, LearnerState] | None:
        """If the run goes back: updates of the best evaluated checkpoint, and its state, as the one after `updates`.

        Call when update number `updates` is made and not published. Raises RunError if the run ends, or if there is no
        such checkpoint any more.
        """
        asked = self._config.run.on_collapse
        newest = next((each for each in reversed(self._telemetry.evaluations) if each.policy == "ema"), None)
        if asked == "warn" or newest is None or not newest.fall or newest.iteration != updates - 1:
            return None
        said, path = stability.describe_fall(newest), self._folder.path
        seconds = self._config.fleet.deadlines.checkpoint
        if asked == "stop":
            await self._world.blocking(
                self._save_best, f"writing lora_best in {path} (fleet.deadlines.checkpoint)", seconds
            )
            raise RunError(
                f"run.on_collapse is stop: {said}. The best trained policy is in {self._folder.lora_best}; a smaller "
                "learner.optimizer.lr may hold, or go on with --resume and run.on_collapse=warn"
            )
        best = int(newest.fall["best"])
        what = f"reading the checkpoint after {best} updates in {path} (fleet.deadlines.checkpoint)"
        try:
            state = await self._world.blocking(lambda: LearnerState.load(self._folder.checkpoint(best)), what, seconds)
        except UserError as error:
            raise RunError(
                f"run.on_collapse is rollback, and {said}, but that checkpoint cannot be read: {error}; go on with "
                "--resume and run.on_collapse=warn"
            ) from error
        rollbacks = 1 + sum(record.rollback is not None for record in self._telemetry.iterations)
        self._telemetry.message(
            f"the run goes back to the policy after {best} updates, with {ROLLBACK_STEP**rollbacks:g} of the "
            "configured learning rate"
        )
        return best, replace(state, updates=updates, rollbacks=rollbacks)
