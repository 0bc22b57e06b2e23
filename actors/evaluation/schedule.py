"""Schedule of evaluations on held-out prompts: before the first iteration, between iterations, and after the last one.

::

    iteration t   explore ─► regenerate ─► learn ─────────────────────────► publish …
                                          └► evaluate the policy after t updates

Between iterations, regenerators evaluate during the next update, when they are idle. This delays the iteration only if
the evaluation takes longer than the update. If regenerators and learner share GPUs, where the learner would have to
wait, the evaluation runs before the iteration instead.
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
        """Evaluate real images, if configured, and the base model.

        Revision 0 is the base model (LoRA's B is zero), unless the run was warm-started: then both are evaluated.
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
        """If the policy after `updates` is due for evaluation, evaluate it now or prepare it for `beside_update`.

        Returns True if the evaluation ran now.
        """
        if not self._is_due(updates):
            return False
        if self._colocated:
            await self.evaluate_ema(updates)
        else:
            self._prepared = updates, await self._publisher.policy("ema")
        return self._colocated

    def holds_up(self, updates: int) -> bool:
        """True if the iteration after `updates` has to wait for an evaluation."""
        return self._colocated and self._is_due(updates)

    async def beside_update(self) -> None:
        """Run the evaluation that `before_iteration` prepared, if any."""
        if self._prepared is not None:
            (updates, publication), self._prepared = self._prepared, None
            await self._evaluate(updates, publication, overlaps=True)

    async def evaluate_ema(self, updates: int) -> None:
        """Evaluate the EMA after `updates`, unless the run already has this evaluation. Waits for the end."""
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
