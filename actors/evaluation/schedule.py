"""When which policy is evaluated on held-out prompts: before the first iteration, on the way, after the last.

::

    iteration t   explore ─► regenerate ─► learn ─────────────────────────► publish …
                                          └► evaluate what t updates made

On the way the regenerators do it beside the next update, in which they have nothing else to do: the iteration takes
longer only by what the update does not cover. Learners that take turns with others on a GPU would have to wait for it,
so there it comes before the iteration, and everybody waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.dispatch.prompt_embeddings import PromptEmbeddings
from actors.evaluation.evaluator import Evaluator
from actors.monitoring.telemetry import Telemetry
from actors.training.policy_publisher import PolicyPublisher
from solrl_ray.config.schema import Config
from solrl_ray.config.sharing import takes_turns
from solrl_ray.records import Prompt
from solrl_ray.weight_sync.publication import Publication


class EvaluationSchedule:
    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        embeddings: PromptEmbeddings,
        revisions: PolicyPublisher,
        evaluator: Evaluator,
        telemetry: Telemetry,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._embeddings = embeddings
        self._revisions = revisions
        self._evaluator = evaluator
        self._telemetry = telemetry
        self._turns = takes_turns(config.fleet)
        self._prepared: tuple[int, Publication] | None = None

    def start(self) -> None:
        """What there is before the first update.

        Revision 0 is the base model (LoRA's B is zero), unless the run was warm-started: then both are measured.
        """
        if self._config.evaluation.reference and not self._done("real", 0):
            self._evaluator.run("real", 0, self._prompts, {})
        if not self._done("base", 0):
            if self._config.run.init:
                self._revisions.evaluate(self._revisions.policy("base"))
            holder = "base" if self._config.run.init else ""
            self._evaluator.run("base", 0, self._prompts, self._embeddings.of(self._prompts), holder=holder)

    def goes_beside(self, updates: int) -> bool:
        """Whether what so many updates made is to be evaluated beside the next one."""
        return self._is_due(updates) and not self._turns

    def comes_before(self, updates: int) -> bool:
        """Whether what so many updates made is to be evaluated before the next one."""
        return self._is_due(updates) and self._turns

    def wants(self, updates: int) -> bool:
        """Whether the EMA of so many updates has yet to be evaluated."""
        return not self._done("ema", updates)

    def run(self, updates: int, publication: Publication, *, overlaps: bool = False) -> None:
        """Evaluate the EMA of so many updates, while the controller waits, or (`overlaps`) beside an update."""
        self._revisions.evaluate(publication)
        embeddings = self._embeddings.of(self._prompts)
        self._evaluator.run("ema", updates, self._prompts, embeddings, overlaps=overlaps)

    def prepare(self, updates: int) -> None:
        """Have the learners merge what is to be evaluated beside the next update. To be done aside."""
        self._prepared = updates, self._revisions.policy("ema")

    @property
    def seconds(self) -> float:
        """The longest that what is prepared may take, by the deadlines of its units."""
        return len(self._prompts) * self._config.fleet.deadlines.regenerate if self._prepared else 0.0

    def run_prepared(self) -> None:
        """Evaluate what `prepare` prepared; nothing to do if it did not."""
        if self._prepared is not None:
            (updates, publication), self._prepared = self._prepared, None
            self.run(updates, publication, overlaps=True)

    def _is_due(self, updates: int) -> bool:
        every = self._config.evaluation.every
        return bool(every) and updates % every == 0 and updates < self._config.run.iterations and self.wants(updates)

    def _done(self, policy: str, updates: int) -> bool:
        return any(e.policy == policy and e.iteration == updates for e in self._telemetry.evaluations)
