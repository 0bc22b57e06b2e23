"""State shared by the steps of a validation: the model's configuration, the device, and earlier results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solrl_ray import models
from solrl_ray.config.schema import Config
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.references import SeesReferences
from solrl_ray.models.stock_call import StockCall
from solrl_ray.prompts.embedding_cache import embedding_digest
from solrl_ray.prompts.prompt_set import negative_prompt, prompt_id
from solrl_ray.records import Address, Prompt, PromptEmbedding, SampleGroup, UnitResult, WorkUnit
from solrl_ray.rewards.base import IMAGES, VIDEOS, Reward
from solrl_ray.rollout.sampler import Sampled, Sampler, group_of
from solrl_ray.sampling.noise import initial_noise
from solrl_ray.validation.steps import free

TEXTS = ("a red circle above a blue square", "two green triangles")
PROMPTS = tuple(Prompt(id=prompt_id(text), text=text) for text in TEXTS)
SEEDS = (3, 17)
"""Indices of the candidates sampled for each prompt."""
PROBE_SIGMA = 0.5


class Brightness(Reward):
    """The mean of a picture's or video's pixels, so that no reward's checkpoint is needed."""

    ndims = (IMAGES, VIDEOS)

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return images.float().flatten(1).mean(dim=1)


@dataclass(frozen=True, slots=True)
class StockRun:
    """The stock pipeline's run for the first prompt. Tensors are float32 on the CPU."""

    sigmas: list[float]
    passed: list[tuple[Tensor, Tensor, Tensor]]
    """State, velocity and following state of each step, [1, *latent_shape]; the last one is clean."""
    picture: Tensor
    """[1, 3, H, W], of a video [1, 3, T, H, W], in [0, 1]."""


@dataclass(slots=True)
class Session:
    config: Config
    device: torch.device
    steps: int
    """Solver steps of the comparison with the stock pipeline and of previews."""
    embeddings: dict[str, PromptEmbedding] = field(default_factory=dict)
    stock: StockRun | None = None
    model: DiffusionModel | None = None
    """In full precision, with its decoder; while steps need it."""
    reference: Tensor | None = None
    """`probe` of the model in full precision."""
    groups: list[SampleGroup] = field(default_factory=list)
    factors: dict[str, Tensor] = field(default_factory=dict)
    """LoRA factors to publish."""
    pictures: dict[str, list[Tensor]] = field(default_factory=dict)
    """Row of the report → pictures [3, H, W] or videos [3, T, H, W] of the first prompt, on the CPU."""

    @property
    def drawing(self) -> StockCall:
        """As of evaluations, but without an interval of guidance that the stock pipeline does not have."""
        found = StockCall.of(self.config, self.steps)
        if not found.differs:
            return found
        return replace(found, model=found.model.changed({"cfg.interval": (0.0, 1.0)}))

    @property
    def references(self) -> NDArray[np.uint8]:
        """The reference pictures of all prompts, uint8 [n, 3, H, W]: an edge on a slope of colours, each elsewhere."""
        height, width = self.config.model.shapes[0].height, self.config.model.shapes[0].width
        down, right = (np.linspace(0, 255, side).astype(np.uint8) for side in (height, width))
        picture = np.stack(np.broadcast_arrays(down[:, None], right, np.uint8(90)))
        picture[:, height // 4 : height // 2, width // 4 : width // 2] = 250
        turned = [np.roll(picture, number * width // 4, 2) for number in range(self.config.model.references)]
        return np.ascontiguousarray(np.stack(turned))

    def load(self, *components: str) -> DiffusionModel:
        """Uses the product's own loader."""
        return models.load(self.config.model, self.device, components=set(components))

    def release(self) -> None:
        """Free the memory of the model in full precision."""
        self.model = None
        free(self.device)

    def embed(self, model: DiffusionModel) -> dict[str, PromptEmbedding]:
        """Embeddings of all prompts, by prompt id, with the negative prompt of the drawn pictures if there is one, else
        of the samples.
        """
        negative = negative_prompt(self.config.evaluated_model) or negative_prompt(self.config.model)
        texts = [*PROMPTS, *([negative] if negative else [])]
        given = [each.text for each in texts]
        if isinstance(model, SeesReferences) and self.config.model.references:
            encoded = model.encode_seeing(given, [torch.from_numpy(self.references)] * len(given))
        else:
            encoded = model.encode(given)
        made = [
            PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest=embedding_digest(tensors))
            for prompt, tensors in zip(texts, encoded, strict=True)
        ]
        found = [each.against(made[-1]) for each in made[:-1]] if negative else made
        return {each.prompt_id: each for each in found}

    def batch(self, model: DiffusionModel, count: int) -> dict[str, Tensor]:
        """The first prompt's embedding, `count` times."""
        return model.batch_embeddings([self.embeddings[PROMPTS[0].id]] * count)

    def noise(self, model: DiffusionModel, count: int = 1) -> Tensor:
        """Addressed, float32 [count, *latent_shape] on the CPU: the same on every machine."""
        where = Address(run_seed=self.config.run.seed, purpose="validation")
        return initial_noise([replace(where, index=index) for index in range(count)], model.latent_shape)

    @torch.no_grad()
    def probe(self, model: DiffusionModel) -> tuple[Tensor, float]:
        """The velocity of two addressed noises at half the noise level, float32 [2, *latent_shape] on the CPU; and the
        seconds of that forward. Without guidance, which would enlarge the errors that are compared.
        """
        embedding, latents = self.batch(model, len(SEEDS)), self.noise(model, len(SEEDS)).to(self.device)
        started = time.perf_counter()
        velocity = model.with_guidance(model.config.unguided).velocity(latents, PROBE_SIGMA, embedding).cpu()
        return velocity, time.perf_counter() - started

    def sample(
        self,
        sampler: Sampler,
        prompt: Prompt,
        *,
        stage: str = "regenerate",
        iteration: int = 0,
        indices: tuple[int, ...] = SEEDS,
    ) -> tuple[Sampled, SampleGroup]:
        """The samples of one prompt's seeds, as a regenerator makes them, and the group for a learner."""
        unit = WorkUnit(stage=stage, iteration=iteration, revision=iteration, prompt_id=prompt.id, indices=indices)
        sampled = sampler(unit, prompt, self.embeddings[prompt.id])
        scores = tuple(sampled.rewards.tolist())
        result = UnitResult(unit=unit, rewards=scores, worker="validation", score_class="", seconds=0.0)
        return sampled, group_of(result, sampled)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """L2 norm of the difference, relative to the norm of `wanted`."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def psnr(found: Tensor, wanted: Tensor) -> float:
    """Peak signal-to-noise ratio of pictures in [0, 1], dB; infinite if they are equal."""
    square = (found.double() - wanted.double()).square().mean()
    return float(-10 * torch.log10(square))
