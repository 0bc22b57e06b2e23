"""When which policy is evaluated on held-out prompts: before the first iteration, between iterations, after the last.

::

    iteration t   explore ─► regenerate ─► learn ─────────────────────────► publish …
                                          └► evaluate what t updates made

Between iterations, regenerators evaluate beside the next update, when they are idle. The iteration takes longer only if
the evaluation outlasts the update. On cards, where a learner would have to wait for it, it comes before the iteration.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.dispatch.prompt_embeddings import PromptEmbeddings
from actors.evaluation.evaluator import Evaluator
from actors.monitoring.telemetry import Telemetry
from actors.training.policy_publisher import PolicyPublisher
from solrl_ray.config.pools import is_colocated
from solrl_ray.config.schema import Config
from solrl_ray.records import Prompt
from solrl_ray.weight_sync.publication import Publication


class EvaluationSchedule:
    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        embeddings: PromptEmbeddings,
        publisher: PolicyPublisher,
        evaluator: Evaluator,
        telemetry: Telemetry,
    ) -> None:
        self._config, self._prompts, self._embeddings = config, prompts, embeddings
        self._publisher, self._evaluator, self._telemetry = publisher, evaluator, telemetry
        self._colocated = is_colocated(config.fleet)
        self._prepared: tuple[int, Publication] | None = None

    async def before_training(self) -> None:
        """Evaluate what exists before the first update.

        Revision 0 is the base model (LoRA's B is zero), unless the run was warm-started: then both are measured.
        """
        if self._config.evaluation.reference and not self._done("real", 0):
            has_references = self._config.model.references > 0
            model = self._config.model
            embeddings = await self._embeddings.of(self._prompts, model) if has_references else {}
            await self._evaluator.run("real", 0, self._prompts, embeddings)
        if not self._done("base", 0):
            embeddings = await self._embeddings.of(self._prompts, self._config.evaluated_model)
            if self._config.run.init:
                async with self._publisher.evaluating(await self._publisher.policy("base")):
                    await self._evaluator.run("base", 0, self._prompts, embeddings, holder="base")
            else:
                await self._evaluator.run("base", 0, self._prompts, embeddings)
        if self._config.run.init:
            await self.evaluate_ema(0)

    async def before_iteration(self, updates: int) -> bool:
        """If an evaluation of `updates` is due, make it, or prepare it to run beside the next update.

        Returns whether it was made now.
        """
        if not self._is_due(updates):
            return False
        if self._colocated:
            await self.evaluate_ema(updates)
        else:
            self._prepared = updates, await self._publisher.policy("ema")
        return self._colocated

    def holds_up(self, updates: int) -> bool:
        """Whether the iteration after `updates` waits for an evaluation."""
        return self._colocated and self._is_due(updates)

    async def beside_update(self) -> None:
        """Evaluate what `before_iteration` prepared, if anything."""
        if self._prepared is not None:
            (updates, publication), self._prepared = self._prepared, None
            await self._evaluate(updates, publication, overlaps=True)

    async def evaluate_ema(self, updates: int) -> None:
        """Evaluate the EMA after `updates` and wait for it, unless that was done."""
        if not self._done("ema", updates):
            await self._evaluate(updates, await self._publisher.policy("ema"), overlaps=False)

    async def _evaluate(self, updates: int, publication: Publication, *, overlaps: bool) -> None:
        embeddings = await self._embeddings.of(self._prompts, self._config.evaluated_model)
        async with self._publisher.evaluating(publication):
            await self._evaluator.run("ema", updates, self._prompts, embeddings, overlaps=overlaps)

    def _is_due(self, updates: int) -> bool:
        every = self._config.evaluation.every
        due = bool(every) and updates % every == 0 and updates < self._config.run.iterations
        return due and not self._done("ema", updates)

    def _done(self, policy: str, updates: int) -> bool:
        return any(e.policy == policy and e.iteration == updates for e in self._telemetry.evaluations)
