"""Base class of explorers and regenerators: a model with attested arithmetic that holds one proved revision.

A revision's weights are loaded in place and proved by a receipt. Every unit checks that its revision is the loaded one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import torch

from actors.cluster import termination
from actors.cluster.progress_notes import noted
from actors.cluster.rpc import Callee
from solrl_ray.common.progress_note import progress_note
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import Sampling
from solrl_ray.errors import NonsenseError
from solrl_ray.gpu.shared_model import Role, SharedModel
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.compilation import compile_, compile_decoder, what_compiles
from solrl_ray.quantization import attestation
from solrl_ray.quantization.scope import QuantizationReport
from solrl_ray.records import Address, Attestation, Prompt, PromptEmbedding, Receipt, Refusal, UnitResult, WorkUnit
from solrl_ray.rewards.base import Reward
from solrl_ray.rollout.sampler import Previewed, Sampled, Samplers
from solrl_ray.sampling.noise import initial_noise
from solrl_ray.weight_sync.checksums import tensors_digest
from solrl_ray.weight_sync.payload import Payload, Unusable
from solrl_ray.weight_sync.receive import Receiver

PROBE_SIGMA = 0.5
S = TypeVar("S", Sampled, Previewed)
P = TypeVar("P", Prompt, Sequence[Prompt])
E = TypeVar("E", PromptEmbedding, Sequence[PromptEmbedding])
"""P and E: prompt and embedding of a unit, or the sequences of both for a unit of an evaluation."""


class SamplingWorker(Callee):
    """The constructor loads nothing. Subclasses load in `start`, so that errors reach the caller: Ray reports an error
    in a constructor as the death of the actor, without its cause.
    """

    role: ClassVar[Role]
    _shared: SharedModel | None = None
    """The model that all roles on this GPU share; None if this worker does not share its process."""

    def __init__(self, name: str, config: Config) -> None:
        self._name = name
        self._config = config
        self._holds: tuple[str, int] | None = None

    def share(self, model: SharedModel) -> None:
        """Use the model that all roles on this GPU share. Call before `start`."""
        self._shared = model

    def leave(self) -> None:
        """End this role; the other roles on the GPU stay."""
        if self._shared is not None:
            self._shared.leave(self.role)

    def _attest(
        self,
        model: DiffusionModel,
        report: QuantizationReport,
        reward: Reward,
        sampling: Sampling,
        *,
        threads: int,
        record: bool,
        receiver: Receiver,
    ) -> Attestation:
        """Take over the loaded model and attest the arithmetic that really runs (design law 5). Last step of `start`.

        `record`: keep the transitions that the learner can train on.
        """
        config = self._config
        with progress_note(f"testing the arithmetic in {sampling.tier}"):
            checks = attestation.attest(model.transformer, sampling.tier, report)
        checks["compiled"] = compile_(model.transformer, config.compile, model.device, sampling.tier)
        checks["decoder compiled"] = compile_decoder(model.decoder, config.compile, model.device)
        compiled = what_compiles(checks["compiled"], checks["decoder compiled"])
        self._score_class = attestation.score_class(
            model.device,
            sampling.tier,
            micro_batch=sampling.micro_batch,
            threads=threads,
            compiled=compiled,
            cfg=config.model.cfg,
        )
        if self._shared is None:  # a shared process has its handler already (`GpuProcess`)
            termination.listen()
        self._model = model
        self._threads = threads
        self._receiver = receiver
        self._sampler = Samplers(
            config, model, reward, steps=sampling.steps, micro_batch=sampling.micro_batch, record=record
        )
        return Attestation(
            worker=self._name,
            device=attestation.device_name(model.device),
            tier=sampling.tier,
            score_class=self._score_class,
            checks=checks,
            quantized_layers=len(report.layers),
            skipped_layers=len(report.skipped),
            warm_ups=len(self._shapes()) if compiled else 0,
        )

    def _shapes(self) -> tuple[Callable[[PromptEmbedding], object], ...]:
        """One forward pass for each shape that this worker uses."""
        return *([self._probe] if self._is_reproducible else []), *self._sampler.warm_ups

    @property
    def _is_reproducible(self) -> bool:
        """True if its kernels give the same bits every time."""
        return self._model.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()

    @noted
    def warm_up(self, shape: int, embedding: PromptEmbedding) -> None:
        """Compile the forward pass for one shape. A separate call for each, so that the progress is visible."""
        self._bring_weights_to_gpu()
        with progress_note(f"compiling forward pass {shape + 1} of {len(self._shapes())}"):
            self._shapes()[shape](embedding)

    def _bring_weights_to_gpu(self) -> None:
        """On a shared GPU: restore the weights that this role computes with."""
        if self._shared is not None:
            self._shared.bring_weights_for(self.role)
            torch.set_num_threads(self._threads)

    def load_revision(self, payload: Payload, probe: PromptEmbedding, full: bool) -> Receipt | Refusal:
        """Verify a payload and load it in place; if kernels are reproducible, run one forward pass on fixed inputs.

        Args:
            payload: weights of the revision.
            probe: embedding for this forward pass.
            full: True if no other payload could help, because it leaves nothing out or was already sent again.

        Returns a receipt; or a refusal if the payload is unusable and `full` is false, so that it is sent again.

        Raises RunError: the payload binds no module, does not fit this model, or gives other weights than published; or
        it is unusable and `full` is true.
        """
        termination.check(self._name)
        started = time.perf_counter()
        self._holds = None  # until it is proved, no unit may use the revision
        try:
            payload.verify()
            applied = self._shared.apply if self._shared is not None else Receiver.apply
            bound, digest = applied(self._receiver, payload)
        except Unusable as error:
            if full:
                raise
            return Refusal(worker=self._name, reason=str(error))
        self._bring_weights_to_gpu()
        manifest = payload.manifest
        self._holds = (manifest.policy, manifest.revision)
        return Receipt(
            worker=self._name,
            role=self.role,
            revision=manifest.revision,
            score_class=self._score_class,
            policy=manifest.policy,
            bound_modules=bound,
            buffer_digest=digest,
            # Empty where equal weights may round differently: such digests cannot be compared.
            probe_digest=self._probe(probe) if self._is_reproducible else "",
            reproducible=self._is_reproducible,
            seconds=time.perf_counter() - started,
        )

    @torch.no_grad()
    def _probe(self, embedding: PromptEmbedding) -> str:
        """Digest of the velocity for one fixed latent: equal weights in the same score class give equal digests."""
        where = Address(run_seed=self._config.run.seed, purpose="probe")
        latents = initial_noise([where], self._model.latent_shape).to(self._model.device)
        velocity = self._model.velocity(latents, PROBE_SIGMA, self._model.batch_embeddings([embedding]))
        return tensors_digest({"velocity": velocity})

    def _scored(
        self, sampler: Callable[[WorkUnit, P, E], S], unit: WorkUnit, prompt: P, embedding: E
    ) -> tuple[UnitResult, S]:
        """Run `sampler` on a unit; returns the unit's result (rewards, seconds) and the output of `sampler`.

        Raises NonsenseError unless this worker holds exactly the unit's revision, and Leaving after SIGTERM.
        """
        termination.check(self._name)
        wanted = (unit.policy, unit.revision)
        if wanted != self._holds:
            raise NonsenseError(f"{self._name} holds {self._holds}, but {unit.describe()} needs {wanted}")
        self._bring_weights_to_gpu()
        began, started = time.time(), time.perf_counter()
        sampled = sampler(unit, prompt, embedding)
        result = UnitResult(
            **sampled.columns,
            unit=unit,
            worker=self._name,
            score_class=self._score_class,
            seconds=time.perf_counter() - started,
            started=began,
            reward_costs=sampled.reward_costs or None,
        )
        return result, sampled
