"""How a worker holds a policy revision: loaded in place, proved by a receipt, checked before every unit."""

from __future__ import annotations

import time

import torch
from torch import nn

from actors.cluster import termination
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.errors import NonsenseError
from solrl_ray.models.base import DiffusionModel
from solrl_ray.quantization.scope import plan
from solrl_ray.records import Address, PromptEmbedding, Receipt, Refusal, WorkUnit
from solrl_ray.sampling.noise import initial_noise
from solrl_ray.weight_sync import payload
from solrl_ray.weight_sync.branch import add_branches
from solrl_ray.weight_sync.checksums import tensors_digest
from solrl_ray.weight_sync.container import Buffer, Unusable
from solrl_ray.weight_sync.publish import touched_linears
from solrl_ray.weight_sync.receive import Receiver, quantized_bases

PROBE_SIGMA = 0.5


class LoadedPolicy:
    """One worker's side of publishing."""

    def __init__(
        self,
        worker: str,
        role: str,
        config: Config,
        model: DiffusionModel,
        score_class: str,
        *,
        quantized_base: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """`quantized_base` as for `Receiver`."""
        termination.listen()
        self._worker = worker
        self._role = role
        self._run_seed = config.run.seed
        self._model = model
        self._score_class = score_class
        self._receiver = Receiver(model.transformer, quantized_base=quantized_base)
        self._holds: tuple[str, int] | None = None

    def load(self, content: Buffer, probe: PromptEmbedding, full: bool) -> Receipt | Refusal:
        """Verify a payload, swap it in, and run one forward on fixed inputs.

        Args:
            full: the payload asks nothing of what this worker holds, so there is no other one to ask for.

        Raises:
            RunError: the payload binds no module or does not fit this model; or it is damaged although it is full.
        """
        termination.check(self._worker)
        started = time.perf_counter()
        self._holds = None  # until it is proved, this worker holds nothing that may be used
        try:
            received = payload.read(content)
            bound, digest = self._receiver.apply(received)
        except Unusable as error:
            if full:
                raise
            return Refusal(worker=self._worker, reason=str(error))
        manifest = received.manifest
        self._holds = (manifest.policy, manifest.revision)
        return Receipt(
            worker=self._worker,
            role=self._role,
            revision=manifest.revision,
            score_class=self._score_class,
            policy=manifest.policy,
            bound_modules=bound,
            buffer_digest=digest,
            probe_digest=self._probe(probe),
            reproducible=self._model.device.type == "cpu" or torch.are_deterministic_algorithms_enabled(),
            seconds=time.perf_counter() - started,
        )

    def warm_up(self, embedding: PromptEmbedding) -> None:
        """The forward of a receipt's probe, so that what is compiled for it is."""
        self._probe(embedding)

    def check(self, unit: WorkUnit) -> None:
        """Raises NonsenseError unless this worker holds exactly the unit's revision, Leaving after SIGTERM."""
        termination.check(self._worker)
        wanted = (unit.policy, unit.revision)
        if wanted != self._holds:
            raise NonsenseError(f"{self._worker} holds {self._holds}, but unit {unit.id} wants {wanted}")

    @torch.no_grad()
    def _probe(self, embedding: PromptEmbedding) -> str:
        """Digest of the velocity at one addressed state: equal weights in one score class give equal digests."""
        latents = initial_noise([Address(run_seed=self._run_seed, purpose="probe")], self._model.latent_shape)
        batch = self._model.batch_embeddings([embedding])
        velocity = self._model.velocity(latents.to(self._model.device), PROBE_SIGMA, batch)
        return tensors_digest({"velocity": velocity})


def base_to_keep(transformer: nn.Module, config: Config) -> dict[str, torch.Tensor]:
    """What an explorer must remember of its base before it is quantised, to take factors alone."""
    if config.publish.mode != "lora":
        return {}
    linears = touched_linears(transformer, config.model.lora.targets)
    tiers = plan(linears, pool_sampling(config).tier, config.model.quantization).tiers
    return quantized_bases(transformer, config.model.lora.targets, tiers)


def make_room(transformer: nn.Module, config: Config, dtype: torch.dtype) -> None:
    """Put live branches beside an explorer's quantised layers, if that is how revisions reach it."""
    if config.publish.mode == "branch":
        add_branches(transformer, config.model.lora.targets, config.model.lora.rank, dtype)
