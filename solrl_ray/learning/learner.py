"""The policy update of an iteration, on one rank. Each pass runs as soon as its samples have arrived.

::

    groups, in prompt order ─► check ─► in each of `learner.epochs`, for each of `learner.updates` parts of the prompts:
                                        │
         for every micro-batch of this rank:
             passes of the objective ─► reference velocities (no gradient), all passes   as samples arrive
             for every pass: v_theta ─► loss ─► backward                                 once advantages are known
                                        │
         loss finite on all ranks? ─► one AdamW step ─► EMA ─┐
                                                             └─► decay of `old` ─► revision + 1

Randomness is addressed, the order of all sums is fixed, and the only input is full-precision samples with
full-precision rewards (`SampleGroup`). So, at a given world size, an update is a function of state and samples.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed

from solrl_ray import objectives
from solrl_ray.common.tensor_serialization import to_host
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.learning.batches import Slots, check_groups, fingerprint, gather
from solrl_ray.learning.engine import MOMENTS, Engine
from solrl_ray.learning.open_update import OpenUpdate, Prepared, StepShare
from solrl_ray.learning.policy_passes import PolicyPasses, by_shape
from solrl_ray.learning.state import LearnerState
from solrl_ray.learning.update_metrics import Step, UpdateMetrics, update_metrics
from solrl_ray.models.base import DiffusionModel
from solrl_ray.objectives.base import MicroBatch, Pass, Velocities
from solrl_ray.objectives.schedules import ema_decay, follower_decay, learning_rate
from solrl_ray.policy import adapters
from solrl_ray.records import PromptEmbedding, SampleGroup, SampleShape
from solrl_ray.sampling.schedules import sigmas


class Learner:
    """Trains ``default``, and updates ``old`` (the sampling policy) and the EMA.

    Join the process group first (`engine.process_group`). `update`, `finish` and `state` are collective: every rank
    must call them, `update` with equal arguments.
    """

    def __init__(
        self,
        config: Config,
        model: DiffusionModel,
        rank: int,
        world_size: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Attach the adapters to `model.transformer` at revision 0.

        `check`: called before each pass with gradient; it raises if the update cannot be completed.

        Raises UserError if the learner cannot be compiled as configured.
        """
        self._config, self._model, self._check_peers = config, model, check
        self._rank, self._world_size = rank, world_size
        self._updates = self._steps = self._rollbacks = 0
        self._failed = False
        self._open: OpenUpdate | None = None
        steps, section = config.rollout.regenerate.steps, config.objective
        self._by_shape = by_shape(model, config.model.shapes)
        self._objectives = {
            shape: objectives.load(config, sigmas(config.model.schedule, steps, of_shape.image_tokens))
            for shape, of_shape in self._by_shape.items()
        }
        self._transitions = config.rollout.sampler.recorded(steps) if section.needs_trajectory else 0
        self._anchor_decay = section.anchor_decay()
        self._passes = PolicyPasses(config, model)
        self._parameters = adapters.parameters(model.transformer, "default")
        self._ema = adapters.Ema(adapters.factors(model.transformer, "default"))
        self._engine = Engine.build(config.learner, list(self._parameters.values()), self._passes.velocity)

    @property
    def revision(self) -> int:
        """Revision of `old`; the next update trains on samples of this revision."""
        return self._updates

    @property
    def compiled(self) -> str:
        """A description of the compiled passes; empty if none is compiled."""
        return self._passes.compiled

    def warm_up(self, policy: adapters.Active, embedding: PromptEmbedding, shape: SampleShape | None = None) -> float:
        """Compile the passes of one policy, for a micro-batch of one shape; returns the seconds it took.

        It changes no state and is not collective.

        `shape`: None: the run's only shape.
        """
        started = time.perf_counter()
        self._passes.warm_up(policy, embedding, shape)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def update(
        self, iteration: int, groups: Sequence[SampleGroup], embeddings: Mapping[str, PromptEmbedding]
    ) -> UpdateMetrics:
        """Make a whole update at once: `begin`, `add_groups` and `finish`. Collective.

        Args:
            groups: all groups of the iteration, in prompt order, drawn by revision `self.revision`.
            embeddings: prompt id → embedding.
        """
        self.begin(iteration, [len(group.indices) for group in groups])
        try:
            self.add_groups(groups, embeddings)
            return self.finish(iteration)
        finally:
            self._open = None

    def begin(self, iteration: int, sizes: Sequence[int]) -> None:
        """Open the update of an iteration; does nothing if it is already open. Not collective.

        `sizes`: number of samples of each prompt, in prompt order.

        Raises RunError if the update of another iteration is open, or an earlier one failed half-way.
        """
        self._check_whole()
        if self._open is not None and self._open.iteration == iteration:
            return
        if self._open is not None:
            raise RunError(f"the update of iteration {self._open.iteration} is open; {iteration} cannot begin")
        if not sizes:
            raise RunError(f"iteration {iteration} has no samples to learn from")
        self._open = OpenUpdate(
            iteration,
            sizes,
            self._config.learner,
            rank=self._rank,
            world_size=self._world_size,
            device=self._model.device,
            one_shape=len(self._by_shape) == 1,
        )

    @property
    def taken(self) -> int:
        """Number of groups that the open update has taken."""
        return 0 if self._open is None else len(self._open.groups)

    def add_groups(self, groups: Sequence[SampleGroup], embeddings: Mapping[str, PromptEmbedding]) -> None:
        """Add the next groups to the open update, in prompt order, and run all passes that are possible now.

        These are the passes that need neither later groups nor other ranks.

        Raises RunError if the learner must not train on a group (`batches.check_groups`); then nothing changes.
        """
        started = time.perf_counter()
        update = self._opened()
        check_groups(
            [*update.groups, *groups],
            iteration=update.iteration,
            revision=self.revision,
            latent_shapes={shape: of_shape.latent_shape for shape, of_shape in self._by_shape.items()},
            transitions=self._transitions,
            checked=len(update.groups),
        )
        update.add(groups, embeddings)
        if not update.complete:  # otherwise `finish` follows, which keeps one micro-batch at a time in memory
            with self._poison_on_error():
                self._advance(update, update.parts[0], final=False)
        update.seconds += time.perf_counter() - started

    def finish(self, iteration: int) -> UpdateMetrics:
        """Make the optimiser steps of the open update, then update the sampling policy. Collective.

        The EMA is updated after each optimiser step.

        Raises RunError if samples are missing, ranks have different samples, or a loss or gradient is not finite. The
        failed step changes no weight. If an update fails half-way, the learner refuses further updates.
        """
        started = time.perf_counter()
        update = self._opened()
        if update.iteration != iteration or not update.complete:
            raise RunError(
                f"the update of iteration {iteration} cannot be finished: the open update, of iteration "
                f"{update.iteration}, has {len(update.groups)} of {len(update.sizes)} prompts"
            )
        self._failed = any(part.sums.passes for part in update.parts)  # gradients cannot be undone
        self._check_ranks_agree(fingerprint(update.groups))
        with self._poison_on_error():
            done = [self._step(update, part) for part in update.parts]
            self._follow()
        self._open = None
        update.seconds += time.perf_counter() - started
        return update_metrics(update, done, revision=self.revision)

    def _opened(self) -> OpenUpdate:
        self._check_whole()
        if self._open is None:
            raise RunError("no update is open")
        return self._open

    def _check_whole(self) -> None:
        if self._failed:
            raise RunError("this learner's last update failed half-way; build a new one from the last state")

    @contextmanager
    def _poison_on_error(self) -> Iterator[None]:
        """If the block fails, the learner refuses further updates."""
        self._failed = True
        yield
        self._failed = False

    def _step(self, update: OpenUpdate, part: StepShare) -> Step:
        """Make one optimiser step; returns its sums over all ranks and the gradient norm."""
        self._advance(update, part, final=True)
        sums = part.sums
        torch.distributed.all_reduce(sums.shares)
        torch.distributed.all_reduce(sums.deviation, op=torch.distributed.ReduceOp.MAX)
        loss = float(sums.shares[0])
        if not math.isfinite(loss):
            raise RunError(f"the loss of iteration {update.iteration} is {loss}: the update was not made")
        self._steps += 1
        gradient_norm = self._engine.step(learning_rate(self._config.learner, self._steps, self._rollbacks))
        self._ema.update(self._parameters, ema_decay(self._steps, self._config.learner.ema_cap))
        if self._anchor_decay is not None:
            adapters.decay_(self._model.transformer, follower_decay(self._anchor_decay, self._steps), "anchor")
        return sums, gradient_norm

    def _advance(self, update: OpenUpdate, part: StepShare, *, final: bool) -> None:
        """Run this rank's forward and backward passes on those samples of a part that have arrived.

        `final`: also run the backward pass of the last micro-batch, which reduces gradients over ranks.
        """
        if part.old_is_default is None:
            part.old_is_default = self._old_is_default()
        known = update.advantages(self._config)
        while part.slots or part.prepared:
            last = len(part.slots) + len(part.prepared) == 1
            if part.prepared and len(known) > part.prepared[0].slots.samples[-1] and (final or not last):
                one = part.prepared.popleft().to(self._model.device)
                advantages = torch.from_numpy(known[list(one.slots.samples)])
                self._learn(update, part, one, advantages.to(self._model.device), last=last)
            elif part.slots and len(update.samples) > part.slots[0].samples[-1]:
                one = self._prepare(update, part, part.slots.popleft())
                is_next = final or len(known) > one.slots.samples[-1]
                # Only the micro-batch in progress stays on the device.
                part.prepared.append(one if is_next else one.to("cpu"))
            else:
                break

    def _prepare(self, update: OpenUpdate, part: StepShare, slots: Slots) -> Prepared:
        """Run a micro-batch's passes without gradient.

        They never run between a forward and its backward. All run together, so that adapters are switched once instead
        of once per pass.
        """
        batch = gather(update.samples, slots)
        passes = self._objectives[batch.shape].passes(batch, self._model.device, update.iteration, part.epoch)
        embedding = self._embedding(update, batch)
        references = self._references(passes, embedding, batch.shape, old_is_default=bool(part.old_is_default))
        return Prepared(slots, batch, passes, references)

    def _learn(
        self, update: OpenUpdate, part: StepShare, one: Prepared, advantages: torch.Tensor, *, last: bool
    ) -> None:
        """Accumulate the gradient of a micro-batch.

        `last`: whether it is this rank's last one before the optimiser step.
        """
        adapters.use(self._model.transformer, "default")
        embedding = self._embedding(update, one.batch)
        weights = one.batch.weights.to(self._model.device)
        scale = 1.0 / (len(part.samples) * len(one.passes))
        for k, inputs in enumerate(one.passes):
            self._check_peers()
            v_theta = self._engine.velocity(inputs.x_t, inputs.t, embedding, one.batch.shape)
            # Reusing v_theta makes the ratio of an unchanged policy exactly 1.
            old = {"old": v_theta.detach()} if part.old_is_default else {}
            references = {name: v[k] for name, v in one.references.items()}
            v = Velocities(theta=v_theta, **old, **references)
            loss = self._objectives[one.batch.shape].loss(inputs, v, advantages)
            part.sums.add(loss, weights, scale)
            # DeepSpeed averages over ranks; we need the mean over the samples of all ranks.
            total = (loss.total * weights).sum() * (scale * self._world_size)
            self._engine.backward(total, last=last and k == len(one.passes) - 1)

    def _embedding(self, update: OpenUpdate, batch: MicroBatch) -> dict[str, torch.Tensor]:
        return self._model.batch_embeddings([update.embeddings[p] for p in batch.prompt_ids])

    def _references(
        self,
        passes: Sequence[Pass],
        embedding: dict[str, torch.Tensor],
        shape: SampleShape | None,
        *,
        old_is_default: bool,
    ) -> dict[str, list[torch.Tensor]]:
        """Velocities of each pass under the objective's other policies; `old` only if it differs from `default`."""
        wanted: tuple[adapters.Active, ...] = self._config.objective.references()
        if not old_is_default:
            wanted = (*wanted, "old")
        velocities: dict[str, list[torch.Tensor]] = {}
        with torch.no_grad():
            for name in wanted:
                adapters.use(self._model.transformer, name)
                velocities[name] = [self._passes.velocity(one.x_t, one.t, embedding, shape) for one in passes]
        return velocities

    def _old_is_default(self) -> bool:
        """Whether v_old equals v_theta bit for bit, as before the first update and after a decay of 0.

        The answer is the same for all passes of an optimiser step.
        """
        old = adapters.parameters(self._model.transformer, "old")
        # One comparison result for all factors: separate ones would wait for the GPU hundreds of times.
        differs = torch.stack([torch.ne(value, old[name]).any() for name, value in self._parameters.items()])
        return not bool(differs.any())

    def _check_ranks_agree(self, value: int) -> None:
        extremes = torch.tensor([value, -value], dtype=torch.int64, device=self._model.device)
        torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
        highest, lowest = int(extremes[0]), -int(extremes[1])
        if highest != lowest:
            raise RunError("the ranks of the learner group were given different samples")

    def _follow(self) -> None:
        """Update the sampling policy `old` by its decay, and count the revision."""
        self._updates += 1
        adapters.decay_(self._model.transformer, follower_decay(self._config.objective.old_decay, self._steps))

    def factors(
        self, name: Literal["default", "old", "ema", "anchor", "base"], *, on_host: bool = True
    ) -> dict[str, torch.Tensor]:
        """Copies of LoRA factors by name, float32; those of ``base`` have B = 0.

        `on_host`: True: on the CPU; False: on the learner's device.
        """
        if name == "base":
            copies = adapters.base_factors(adapters.factors(self._model.transformer, "default"))
        elif name == "ema":
            copies = self._ema.factors
        else:
            copies = adapters.factors(self._model.transformer, name)
        return to_host(copies) if on_host else copies

    def state(self, buffers: defaultdict[str, dict[str, torch.Tensor]] | None = None) -> LearnerState:
        """All state that the next update depends on. Collective: moments are gathered from all ranks.

        `buffers`: host memory for the result. The next call reuses it, so the state is valid only until then.
        """
        moments = self._engine.moments()
        names: list[Any] = ["default", "old", "ema", *(["anchor"] if self._anchor_decay else [])]
        parts = {name: self.factors(name, on_host=False) for name in names}
        parts |= {key: dict(zip(self._parameters, moments[key], strict=True)) for key in MOMENTS}
        on_host = {name: to_host(part, None if buffers is None else buffers[name]) for name, part in parts.items()}
        return LearnerState(updates=self._updates, steps=self._steps, rollbacks=self._rollbacks, **on_host)

    def load(self, state: LearnerState) -> None:
        """Continue from `state`, saved at any world size.

        Raises UserError if it belongs to another model or LoRA configuration, RunError if an update is open.
        """
        if self._open is not None:
            raise RunError(f"the update of iteration {self._open.iteration} is open; no state can be loaded")
        state.check_fits({name: p.shape for name, p in self._parameters.items()})
        adapters.load_factors(self._model.transformer, "default", state.default)
        adapters.load_factors(self._model.transformer, "old", state.old)
        self._ema = adapters.Ema({key: value.to(self._model.device) for key, value in state.ema.items()})
        moments = {key: [getattr(state, key)[name] for name in self._parameters] for key in MOMENTS}
        self._engine.restore(moments, state.steps)
        if self._anchor_decay is not None:  # another objective's state has none: it starts at the trained policy
            adapters.load_factors(self._model.transformer, "anchor", state.anchor or state.default)
        self._updates, self._steps, self._rollbacks = state.updates, state.steps, state.rollbacks

    def close(self) -> None:
        """Remove DeepSpeed's hooks from the factors; the process group remains."""
        self._engine.close()
