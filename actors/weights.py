"""How a worker holds a policy revision: loaded in place, proved by a receipt, checked before every unit."""

from __future__ import annotations

import torch

from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.models.base import DiffusionModel
from solrl_ray.noise import initial_noise
from solrl_ray.records import Address, PromptEmbedding, Receipt, WorkUnit
from solrl_ray.revisions.payload import Revision, tensors_digest
from solrl_ray.revisions.receive import Receiver

PROBE_SIGMA = 0.5


class WeightHolder:
    """One worker's side of publishing."""

    def __init__(self, worker: str, role: str, config: Config, model: DiffusionModel, score_class: str) -> None:
        self._worker = worker
        self._role = role
        self._run_seed = config.run.seed
        self._model = model
        self._score_class = score_class
        self._receiver = Receiver(model.transformer)
        self._holds: tuple[str, int] | None = None

    def load(self, payload: bytes, probe: PromptEmbedding) -> Receipt:
        """Verify a payload, swap it in, and run one forward on fixed inputs.

        Raises:
            RunError: the payload is damaged, binds no module, or does not fit this model.
        """
        self._holds = None  # until it is proved, this worker holds nothing that may be used
        revision = Revision.from_bytes(payload)
        bound, digest = self._receiver.apply(revision)
        self._holds = (revision.policy, revision.revision)
        return Receipt(
            worker=self._worker,
            role=self._role,
            revision=revision.revision,
            score_class=self._score_class,
            policy=revision.policy,
            bound_modules=bound,
            buffer_digest=digest,
            probe_digest=self._probe(probe),
        )

    def check(self, unit: WorkUnit) -> None:
        """Raises RunError unless this worker holds exactly the unit's revision."""
        wanted = (unit.policy, unit.revision)
        if wanted != self._holds:
            raise RunError(f"{self._worker} holds {self._holds}, but unit {unit.id} wants {wanted}")

    @torch.no_grad()
    def _probe(self, embedding: PromptEmbedding) -> str:
        """Digest of the velocity at one addressed state: equal weights in one score class give equal digests."""
        latents = initial_noise([Address(run_seed=self._run_seed, purpose="probe")], self._model.latent_shape)
        batch = self._model.batch_embeddings([embedding])
        velocity = self._model.velocity(latents.to(self._model.device), PROBE_SIGMA, batch)
        return tensors_digest({"velocity": velocity})
