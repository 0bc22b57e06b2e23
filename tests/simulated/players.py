"""Who plays in the simulated world: workers whose answers are cheap, pure functions of what they are asked.

The selector is the real one; its files are written in its own thread, so that a run's trace is the same every time.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from actors.workers.regenerator import Evaluated
from actors.workers.selector import Ack, Opened, Selector
from solrl_ray.config.compiled_learner import is_compiled
from solrl_ray.config.pools import is_on_a_card
from solrl_ray.config.schema import Config, Lora
from solrl_ray.errors import NonsenseError
from solrl_ray.learning.state import LearnerState, PolicyFactors
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.planning.update import passes
from solrl_ray.prompts.embedding_cache import embedding_digest
from solrl_ray.records import Attestation, Prompt, PromptEmbedding, Receipt, Refusal, SampleGroup, UnitResult, WorkUnit
from solrl_ray.rollout.selection import survivors
from solrl_ray.scheduling.iteration_state import IterationPlan, IterationSummary, group_digest
from solrl_ray.scheduling.worker_state import pool_of, slot_of
from solrl_ray.storage.journal import parsed
from solrl_ray.weight_sync.checksums import tensors_digest
from solrl_ray.weight_sync.manifest import Policy, is_factor
from solrl_ray.weight_sync.payload import Payload
from solrl_ray.weight_sync.publication import EXPLORER
from solrl_ray.weight_sync.publish import Publisher, RevisionShard

MODULE = "block.to_q"
WIDTH = 32
POLICIES = ("default", "old", "ema")
MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = 2
"""Optimiser's, of an update."""


LACKS = 0.1
"""Share of revisions whose factors a worker does not find on its card."""


def number(*parts: object) -> float:
    """In [0, 1), by what it is of."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32


def rewards(pool: str, weights: str, unit: WorkUnit, *of: object) -> tuple[float, ...]:
    """What a worker of a pool, which holds weights of this digest, answers to a unit; `of`: of
    which of its scores."""
    made = [number(pool, weights, unit.prompt_id, index, *of) for index in unit.indices]
    return tuple(torch.tensor(made, dtype=torch.float32).tolist())


def held_out(weights: str, rewards: tuple[float, ...]) -> tuple[float, ...]:
    """Of an evaluation: policies are further apart than prompts, so that some are collapses."""
    level = number("quality", weights)
    return tuple(level + 1e-5 * reward for reward in rewards)


def publisher(lora: Lora) -> Publisher:
    return Publisher({MODULE: torch.ones(WIDTH, WIDTH)}, lora, formats={MODULE: "nvfp4"})


class TextEncoder:
    def start(self) -> dict[str, str]:
        return {"text_encoder": "simulated"}

    def embed(self, prompts: Sequence[Prompt]) -> list[PromptEmbedding]:
        return [PromptEmbedding(prompt_id=prompt.id, tensors={}, digest=embedding_digest({})) for prompt in prompts]

    def leave(self) -> None: ...


class Worker:
    """Holds a revision, by its proof; its rewards are those of that revision's bytes."""

    role = ""

    def __init__(self, name: str, on_card: bool = False) -> None:
        """`on_card`: whether it is a role of a learner rank's card, which makes its weights of the factors."""
        self._name, self._on_card = name, on_card
        self._holds: tuple[str, int] | None = None
        self._weights = ""

    def alive(self, name: str) -> None: ...

    def start(self) -> Attestation:
        return Attestation(worker=self._name, device="none", tier="none", score_class=self.role, checks={})

    def load_revision(self, payload: Payload, probe: Any, full: bool) -> Receipt | Refusal:
        payload.verify()
        manifest = payload.manifest
        expected = manifest.expected[self.role]
        if self.role == EXPLORER and not self._on_card:  # it is sent nothing but packed weights
            held = tensors_digest({name: each for name, each in payload.tensors.items() if not is_factor(name)})
            assert held == expected.digest, f"{self._name} was sent other weights than {manifest.name} states"
        if self._on_card:
            sent_whole = set(payload.tensors) == {f"{MODULE}.lora_A", f"{MODULE}.lora_B"}
            assert sent_whole if full else not payload.tensors, f"{self._name} was sent something else"
            if not full and number(self._name, manifest.name, expected.digest) < LACKS:
                return Refusal(worker=self._name, reason="its learner holds other factors")
        self._holds = (manifest.policy, manifest.revision)
        self._weights = expected.digest
        return Receipt(
            worker=self._name,
            role=self.role,
            revision=manifest.revision,
            score_class=self.role,
            policy=manifest.policy,
            bound_modules=expected.modules,
            buffer_digest=expected.digest,
            probe_digest=expected.digest,
        )

    def _rewards(self, unit: WorkUnit, *of: object) -> tuple[float, ...]:
        wanted = (unit.policy, unit.revision)
        if wanted != self._holds:
            raise NonsenseError(f"{self._name} holds {self._holds}, but unit {unit.id} wants {wanted}")
        return rewards(pool_of(self._name), self._weights, unit, *of)

    def _result(self, unit: WorkUnit) -> UnitResult:
        rewards = self._rewards(unit)
        return UnitResult(unit=unit, rewards=rewards, worker=self._name, score_class=self.role, seconds=0.5)

    def spoilt(self, value: UnitResult, fault: str) -> UnitResult:
        """What a worker answers that has a fault."""
        if fault == "answers NaN":
            return replace(value, rewards=(float("nan"),) * len(value.rewards))
        if fault == "answers another revision":
            return replace(value, unit=replace(value.unit, revision=value.unit.revision + 1))
        return replace(value, unit=replace(value.unit, prompt_id="0" * 16))


class Explorer(Worker):
    role = "explorer"

    def prepare(self) -> None: ...

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        result = self._result(unit)
        if unit.prune is None:
            return result
        early = self._rewards(unit, "after", unit.prune.after)
        kept = set(survivors(early, unit.prune.keep))
        scores = enumerate(zip(early, result.rewards, strict=True))
        finished = tuple(reward if i in kept else first for i, (first, reward) in scores)
        return replace(result, rewards=finished, early=early)

    def sample(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> tuple[UnitResult, SampleGroup]:
        group = _group(unit, self._rewards(unit), self._name)
        return replace(self._result(unit), samples_digest=group_digest(group)), group

    def spoilt(self, value: Any, fault: str) -> Any:
        return (super().spoilt(value[0], fault), value[1]) if isinstance(value, tuple) else super().spoilt(value, fault)


class Regenerator(Worker):
    role = "regenerator"

    def regenerate(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> tuple[UnitResult, SampleGroup]:
        return self._result(unit), _group(unit, self._rewards(unit), self._name)

    def evaluate(
        self, unit: WorkUnit, prompts: Sequence[Prompt], pictures: int, *embeddings: PromptEmbedding
    ) -> Evaluated:
        units = [replace(unit, prompt_id=prompt.id, beside=()) for prompt in prompts[1:]]
        first, *others = (
            Evaluated(
                unit=each, rewards=held_out(self._weights, self._rewards(each)), images=None, seconds=0.5, started=0.0
            )
            for each in (unit, *units)
        )
        return replace(first, beside=tuple(others))


def _group(unit: WorkUnit, rewards: tuple[float, ...], worker: str) -> SampleGroup:
    latents = torch.tensor([[number("latent", reward)] for reward in rewards], dtype=torch.float32)
    return SampleGroup(
        iteration=unit.iteration,
        revision=unit.revision,
        prompt_id=unit.prompt_id,
        indices=unit.indices,
        rewards=rewards,
        latents=latents,
        seconds=0.5,
        worker=worker,
    )


_PARTS: dict[Any, RevisionShard] = {}
"""What learners have made of equal factors, in any run: a tenth of a run's time."""


class Learner:
    """Its factors are a function of all samples that it ever learned from, and no two of its policies are alike; one of
    a group learns as all do.
    """

    def __init__(self, config: Config) -> None:
        self._publisher = publisher(config.model.lora)
        self._rank = config.model.lora.rank
        self._updates = self._steps = self._rollbacks = 0
        self._b = dict.fromkeys((*POLICIES, *MOMENTS), 0.0)
        """Part of the state → each element of its factor B."""
        self._stored: LearnerState | None = None
        self._fed: list[SampleGroup] = []
        self._to_compile = set(passes(config)) if is_compiled(config) else set()
        """Kinds of passes."""

    def start(self) -> str:
        return "host"

    def warm_up(self, policy: str, embedding: Any, shape: None) -> float:
        self._to_compile.remove(policy)
        return 20.0

    def node(self) -> str:
        return "node-2"

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def join(self, address: str, port: int, one_host: bool) -> None: ...

    def load(self, state: LearnerState) -> None:
        self._updates, self._steps, self._rollbacks = state.updates, state.steps, state.rollbacks
        self._stored = None
        self._b = {part: getattr(state, part)[f"{MODULE}.lora_B"][0, 0].item() for part in self._b}

    def offer(self, iteration: int, sizes: list[int], first: int, groups: list[Any], embeddings: list[Any]) -> None: ...

    def feed(self, iteration: int, groups: list[Any], embeddings: list[Any]) -> None:
        self._fed = [group.value for group in groups]

    def update(self, iteration: int) -> UpdateMetrics:
        assert not self._to_compile, f"update {iteration} of a learner that has not compiled {self._to_compile}"
        assert iteration == self._updates, f"update {iteration} of a learner that has made {self._updates}"
        for step in range(STEPS):
            self._step(number(step, *[group_digest(group) for group in self._fed]))
        self._follow("old")
        self._updates += 1
        self._stored = self._state()
        return UpdateMetrics(
            iteration=iteration,
            revision=self._updates,
            loss=0.0,
            policy_loss=0.0,
            kl=0.0,
            gradient_norm=0.0,
            samples=sum(len(group.indices) for group in self._fed),
            passes=1,
            seconds=0.5,
        )

    def _step(self, gradient: float) -> None:
        self._steps += 1
        mean, square = (self._b[name] for name in MOMENTS)
        self._set("exp_avg", 0.9 * mean + 0.1 * gradient)
        self._set("exp_avg_sq", 0.99 * square + 0.01 * gradient**2)
        self._set("default", self._b["default"] + self._b["exp_avg"] / 2**self._rollbacks)
        self._follow("ema")

    def _follow(self, policy: str) -> None:
        """Move a policy towards the trained one, less with each step."""
        self._set(policy, self._b[policy] + (self._b["default"] - self._b[policy]) / (2 + self._steps))

    def _set(self, part: str, value: float) -> None:
        self._b[part] = ctypes.c_float(value).value

    def state(self) -> LearnerState:
        """That after the last update, which is stored then."""
        stored, self._stored = self._stored, None
        assert stored is not None, "there was no update since the state was asked for"
        return stored

    def _state(self) -> LearnerState:
        parts: dict[str, Any] = {part: self._factors(part) for part in self._b}
        return LearnerState(updates=self._updates, steps=self._steps, rollbacks=self._rollbacks, **parts)

    def _factors(self, part: str) -> dict[str, torch.Tensor]:
        """Of the state, or of the base."""
        return {
            f"{MODULE}.lora_A": torch.ones(self._rank, WIDTH),
            f"{MODULE}.lora_B": torch.full((WIDTH, self._rank), self._b.get(part, 0.0)),
        }

    def factors(self, policy: Policy) -> PolicyFactors:
        return PolicyFactors(self._factors(policy))

    def shard(self, policy: Policy, pack: bool) -> RevisionShard:
        key = policy, self._updates, self._rank, self._b.get(policy, 0.0)
        if key not in _PARTS:
            _PARTS[key] = self._publisher.shard(self._updates, self._factors(policy), policy=policy)
        return _PARTS[key] if pack else replace(_PARTS[key], packed={})


class AtOnce(Executor):
    """Does its work where it is given it."""

    def submit(self, work: Any, *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*arguments))
        except BaseException as error:
            done.set_exception(error)
        return done


class SimulatedSelector(Selector):
    def __init__(self, folder: Path, strict: bool) -> None:
        super().__init__(folder, strict)
        self._writers = AtOnce()  # type: ignore[assignment]
        self._opens = False

    def open(self, plan: IterationPlan) -> Opened:
        self._opens = True
        try:
            return super().open(plan)
        finally:
            self._opens = False

    def drop(self, iteration: int) -> None:
        """What is forgotten must be in a checkpoint."""
        if iteration in self._open and not self._opens:
            written: Any = self._folder.checkpoint(iteration + 1) / "state.json"
            assert written.disk.durable(str(written)) is not None, f"{iteration} is dropped before its checkpoint"
        super().drop(iteration)

    def accept(self, results: Sequence[UnitResult]) -> list[Ack]:
        """What is acknowledged must be on the disk."""
        acks = super().accept(results)
        for result, ack in zip(results, acks, strict=True):
            if not ack.refused:
                unit = result.unit
                written = [(e.get("prompt"), tuple(e.get("indices", ()))) for e in self._durable(unit.iteration)]
                assert (unit.prompt_id, unit.indices) in written, f"{unit.id} was acknowledged before it was written"
        return acks

    def close(self, iteration: int) -> IterationSummary | tuple[WorkUnit, ...]:
        """Before an iteration counts, its groups must be on the disk."""
        summary = super().close(iteration)
        if not isinstance(summary, IterationSummary):
            return summary
        digests = {e["prompt"]: e["digest"] for e in self._durable(iteration) if e["kind"] == "regenerate"}
        for prompt_id in self._of(iteration).state.plan.prompt_ids:
            stored = self._folder._group_path(iteration, prompt_id)
            assert stored.disk.durable(str(stored)) is not None, f"the group of {prompt_id} counts before it is written"  # type: ignore[attr-defined]
            one_stage = self._of(iteration).state.plan.one_stage
            assert one_stage or prompt_id in digests, f"the group of {prompt_id} counts before it is journaled"
        return summary

    def _durable(self, iteration: int) -> list[dict[str, Any]]:
        """The journal's entries that a loss of power would leave."""
        path: Any = self._folder.journal(iteration).path
        lines = (path.disk.durable(str(path)) or b"").splitlines(keepends=True)
        return [entry for line in lines if (entry := parsed(line)) is not None]


WORKERS = {"explorer": Explorer, "regenerator": Regenerator}


def players(config: Config, folder: Path) -> Any:
    """Makes the player of a role."""

    def make(role: str, name: str) -> Any:
        if role == "text_encoder":
            return TextEncoder()
        if role == "selector":
            return SimulatedSelector(folder, config.fleet.strict)
        if role == "learner":
            return Learner(config)
        on_card = is_on_a_card(config, pool_of(name), slot_of(name))
        return WORKERS[role](name, on_card)

    return make
