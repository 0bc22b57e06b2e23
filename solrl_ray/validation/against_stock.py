"""Compares our model with the stock diffusers pipeline: text embeddings, the velocity at each state, one image."""

from __future__ import annotations

import functools
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from solrl_ray import models
from solrl_ray.config.schema import Config, Model
from solrl_ray.models import paths
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.components import DTYPES
from solrl_ray.models.references import SeesReferences
from solrl_ray.models.stock_call import StockCall
from solrl_ray.prompts.embedding_cache import embedding_digest
from solrl_ray.prompts.prompt_set import negative_prompt, prompt_id
from solrl_ray.records import Address, Prompt, PromptEmbedding
from solrl_ray.sampling.noise import initial_noise
from solrl_ray.sampling.schedules import sigmas

TEXTS = ("a red circle above a blue square", "two green triangles")
PROMPTS = tuple(Prompt(id=prompt_id(text), text=text) for text in TEXTS)

FORWARD_LIMITS = {
    "bfloat16": (0.03, "a rounding is up to 2^-9 = 0.002; in dozens of layers with another order of sums, about 0.01"),
    "float32": (1e-3, "a float32 rounding is up to 2^-24; a GPU may compute products in TF32, 2^-11"),
}
"""`model.dtype` → largest relative error of a velocity, and the reason. A wrong timestep, text or position gives more
than 0.1.
"""
PICTURE_LIMITS = {
    "bfloat16": (30.0, "the stock pipeline rounds its state to bfloat16 after each step; ours stays in float32"),
    "float32": (50.0, "float32 roundings allow it; rounding to eight bits per channel gives 59 dB"),
}
"""`model.dtype` → lowest PSNR of an image, dB, and the reason. Wrongly scaled latents give less than 20 dB."""
SIGMA_LIMIT = (1e-5, "the noise levels of the stock pipeline are float32; a wrong shift gives 0.01 or more")
TEXT_LIMIT = (0.1, "kernels round differently, and encoders are deep; one wrong token gives more")


@dataclass(frozen=True, slots=True)
class Measure:
    """One result of a step. If it has a limit that does not hold, the step fails."""

    name: str
    value: float | int | str | bool
    limit: str = ""
    """The limit in words, such as ``at most 0.05``; empty if there is none."""
    why: str = ""
    """The reason for the limit."""
    holds: bool = True

    @property
    def shown(self) -> str:
        """The value as printed."""
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        return f"{self.value:.4g}" if isinstance(self.value, float) else f"{self.value}"


def at_most(name: str, value: float, limit: float, why: str) -> Measure:
    """A measure that holds up to `limit`; NaN fails."""
    return Measure(name, value, f"at most {limit:g}", why, value <= limit)


def at_least(name: str, value: float, limit: float, why: str) -> Measure:
    """A measure that holds from `limit` on; NaN fails."""
    return Measure(name, value, f"at least {limit:g}", why, value >= limit)


def is_true(name: str, value: bool, why: str) -> Measure:
    return Measure(name, value, "yes", why, value)


@dataclass(frozen=True, slots=True)
class StockRun:
    """One run of the stock pipeline, for the first prompt. Tensors are float32 on the CPU."""

    sigmas: list[float]
    passed: list[tuple[Tensor, Tensor, Tensor]]
    """State, velocity and next state of each step, [1, *latent_shape]; the last next state is clean."""
    picture: Tensor
    """Image [1, 3, H, W] or video [1, 3, T, H, W], in [0, 1]."""


@dataclass(slots=True)
class Session:
    """The configuration, the device, and the results of the steps so far."""

    config: Config
    device: torch.device
    steps: int
    """Number of solver steps of each image."""
    embeddings: dict[str, PromptEmbedding] = field(default_factory=dict)
    stock: StockRun | None = None
    model: DiffusionModel | None = None
    """Our model with its decoder; None before `load`."""
    pictures: dict[str, list[Tensor]] = field(default_factory=dict)
    """Row of the report → images [3, H, W] or videos [3, T, H, W] for the first prompt, on the CPU."""

    @property
    def drawing(self) -> StockCall:
        """The settings of an evaluation. If the stock pipeline cannot restrict guidance to an interval, guidance acts
        at all noise levels.
        """
        evaluated = StockCall.of(self.config, self.steps)
        if not evaluated.differs:
            return evaluated
        return replace(evaluated, model=evaluated.model.changed({"cfg.interval": (0.0, 1.0)}))

    @property
    def references(self) -> NDArray[np.uint8]:
        """Reference images for all prompts, uint8 [n, 3, H, W]: a rectangle on a colour gradient, each shifted."""
        height, width = self.config.model.shapes[0].height, self.config.model.shapes[0].width
        down, right = (np.linspace(0, 255, side).astype(np.uint8) for side in (height, width))
        image = np.stack(np.broadcast_arrays(down[:, None], right, np.uint8(90)))
        image[:, height // 4 : height // 2, width // 4 : width // 2] = 250
        shifted = [np.roll(image, number * width // 4, 2) for number in range(self.config.model.references)]
        return np.ascontiguousarray(np.stack(shifted))

    def load(self, *components: str) -> DiffusionModel:
        """Load components with the loader that runs use."""
        return models.load(self.config.model, self.device, components=set(components))

    def embed(self, model: DiffusionModel) -> dict[str, PromptEmbedding]:
        """Prompt id → embedding, for all prompts. It includes the negative prompt of evaluations if there is one, else
        that of the samples.
        """
        negative = negative_prompt(self.config.evaluated_model) or negative_prompt(self.config.model)
        texts = [*PROMPTS, *([negative] if negative else [])]
        words = [prompt.text for prompt in texts]
        if isinstance(model, SeesReferences) and self.config.model.references:
            encoded = model.encode_seeing(words, [torch.from_numpy(self.references)] * len(words))
        else:
            encoded = model.encode(words)
        embeddings = [
            PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest=embedding_digest(tensors))
            for prompt, tensors in zip(texts, encoded, strict=True)
        ]
        if negative:
            embeddings = [embedding.against(embeddings[-1]) for embedding in embeddings[:-1]]
        return {embedding.prompt_id: embedding for embedding in embeddings}

    def batch(self, model: DiffusionModel) -> dict[str, Tensor]:
        """The first prompt's embedding as a batch of one."""
        return model.batch_embeddings([self.embeddings[PROMPTS[0].id]])

    def noise(self, model: DiffusionModel) -> Tensor:
        """Initial noise, float32 [1, *latent_shape] on the CPU; the same on every machine."""
        return initial_noise([Address(run_seed=self.config.run.seed, purpose="validation")], model.latent_shape)


def text(session: Session) -> list[Measure]:
    """Encode the prompts on the CPU, as runs do, and on the device, as the stock pipeline does."""
    needed = models.encoder_components(session.config.model)
    model = models.load(session.config.model, "cpu", components=needed)
    started = time.perf_counter()
    session.embeddings = on_cpu = session.embed(model)
    encoded = time.perf_counter()
    again = session.embed(model)
    equal = all(one.digest == again[key].digest for key, one in on_cpu.items())
    measures = [
        Measure("seconds to encode a prompt on the CPU", (encoded - started) / len(on_cpu)),
        is_true("a prompt encoded twice has equal bytes", equal, "embeddings are cached by content"),
    ]
    if session.device.type == "cuda":
        del model
        session.embeddings = session.embed(session.load(*needed))
        errors = [
            relative_error(tensor.float(), on_cpu[key].tensors[name].float())
            for key, one in session.embeddings.items()
            for name, tensor in one.tensors.items()
            if tensor.is_floating_point()
        ]
        measures.append(at_most("relative error of the GPU's embedding to the CPU's", max(errors), *TEXT_LIMIT))
    return measures


def stock_picture(session: Session) -> list[Measure]:
    """Draw an image with the stock pipeline, called as in the report of a run but with Euler steps. A wrapper around
    its scheduler records each step.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler  # late: importing diffusers takes seconds

    config, drawing = session.config.model, session.drawing
    bare = models.load(config, "cpu", components=())
    noise, passed = session.noise(bare), list[tuple[Tensor, Tensor, Tensor]]()
    pipeline = _pipeline(session)
    own, pipeline.scheduler = pipeline.scheduler, FlowMatchEulerDiscreteScheduler(**drawing.scheduler)
    if drawing.shifts_once:
        _shift_once(pipeline.scheduler)
    step = pipeline.scheduler.step

    @functools.wraps(step)  # pipelines inspect its parameters
    def recorded(model_output: Tensor, timestep: Tensor, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = sample.float().cpu(), model_output.float().cpu()
        result = step(model_output, timestep, sample, *args, **kwargs)
        passed.append((*before, result[0].float().cpu()))
        return result

    pipeline.scheduler.step = recorded
    latents = bare.stock_latents(noise.clone())
    inputs, family = {}, models.family(config)
    keeping: AbstractContextManager[None] = nullcontext()
    if config.references and issubclass(family, SeesReferences):
        images = [Image.fromarray(reference.transpose(1, 2, 0)) for reference in session.references]
        inputs = {"image": images if len(images) > 1 else images[0]}
        keeping = family.stock_keeps_references(config.shapes[0])
    with keeping:
        called = pipeline(prompt=[TEXTS[0]], latents=latents, output_type="pt", **inputs, **drawing.call)
    grid = pipeline.scheduler.sigmas.double().tolist()
    image = called.frames.transpose(1, 2) if config.frames else called.images
    stock = session.stock = StockRun(grid, passed, image.float().cpu())
    session.pictures["stock"] = [stock.picture[0]]
    levels = sigmas(config.schedule, session.steps, bare.image_tokens).tolist()
    difference = max(abs(a - b) for a, b in zip(levels, grid, strict=True))
    begins = relative_error(passed[0][0], noise) < 0.01
    other = {name: own.config.get(name) for name, value in drawing.scheduler.items() if own.config.get(name) != value}
    return [
        Measure("the checkpoint's own scheduler", type(own).__name__ + (f" with {other}" if other else "")),
        at_most("largest difference of a noise level from model.schedule", difference, *SIGMA_LIMIT),
        is_true("begins with our noise", begins, "otherwise two unrelated images are compared"),
        is_true("finite image with contrast", bool(stock.picture.std() > 1e-3), "otherwise nothing is compared"),
    ]


def _shift_once(scheduler: Any) -> None:
    """Give Euler's scheduler the unshifted noise levels of UniPC with ``use_flow_sigmas``, which it then shifts."""
    take = scheduler.set_timesteps
    scheduler.set_timesteps = lambda steps, device=None, **_: take(
        sigmas=[1 - 0.999 * i / steps for i in range(steps)], device=device
    )


def _pipeline(session: Session) -> Any:
    """The stock pipeline of the checkpoint, in eval mode, with offloading on GPUs."""
    config = session.config.model
    source = str(paths.checkpoint(config.path, "model.path"))
    pipeline = models.family(config).PIPELINE.from_pretrained(source, dtype=DTYPES[config.dtype])
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval()
    pipeline.set_progress_bar_config(disable=True)
    if session.device.type == "cuda":
        # One component at a time on the GPU, so that the pipeline needs no more memory than our model.
        pipeline.enable_model_cpu_offload(device=session.device)
    return pipeline


def load(session: Session) -> list[Measure]:
    """Load transformer and decoder with the loader that runs use."""
    session.model = model = session.load("transformer", "vae")
    return [
        Measure("parameters of the transformer", sum(weight.numel() for weight in model.transformer.parameters())),
        Measure("latent shape", " × ".join(map(str, model.latent_shape))),
        Measure("decoder", type(model.decoder).__name__),
    ]


@torch.no_grad()
def forward(session: Session) -> list[Measure]:
    """Compare our velocity with the stock pipeline's at each of its states."""
    assert session.model
    assert session.stock
    config, stock = session.drawing.model, session.stock
    model = session.model.with_guidance(config)
    embedding, errors = session.batch(model), []
    for sigma, (state, wanted, _) in zip(stock.sigmas, stock.passed, strict=False):
        velocity = model.velocity(state.to(session.device), _rounded(config, sigma), embedding)
        errors.append(relative_error(model.predicted(velocity.cpu()), model.predicted(wanted)))
    largest, why = FORWARD_LIMITS[config.dtype]
    limit = largest * (2 * config.cfg.scale - 1), why  # guidance weights the two velocities with s and s - 1
    return [
        at_most("relative error of the first velocity", errors[0], *limit),
        at_most("largest relative error of all steps", max(errors), *limit),
    ]


def _rounded(config: Model, sigma: float) -> float:
    """The noise level that the transformer of the stock pipeline gets."""
    if not models.family(config).ROUNDS_TIMESTEPS:
        return sigma
    return float(torch.tensor(1000 * sigma, dtype=torch.float32).to(DTYPES[config.dtype]) / 1000)


@torch.no_grad()
def picture(session: Session) -> list[Measure]:
    """Compare our image, from the same noise and noise levels, and our decoder's image of the stock latents."""
    assert session.model
    assert session.stock
    stock, model = session.stock, session.model.with_guidance(session.drawing.model)
    embedding, latents, final = session.batch(model), session.noise(model).to(session.device), stock.passed[-1][2]
    for sigma, following in pairwise(stock.sigmas):
        latents = latents + (following - sigma) * model.velocity(latents, sigma, embedding)
    stock_latents = latents.clone()  # given frames enter the latents of the stock pipeline only after its last step
    model.predicted(stock_latents).copy_(model.predicted(final))
    ours, decoded = model.decode(latents).cpu(), model.decode(stock_latents).cpu()
    session.pictures["ours, same noise"] = [ours[0]]
    limit = PICTURE_LIMITS[session.config.model.dtype]
    return [
        at_least("PSNR of the image, dB", psnr(ours, stock.picture), *limit),
        at_least("PSNR of our decoder on the stock latents, dB", psnr(decoded, stock.picture), *limit),
    ]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """L2 norm of the difference, relative to the norm of `wanted`."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def psnr(found: Tensor, wanted: Tensor) -> float:
    """Peak signal-to-noise ratio of images in [0, 1], dB; infinite if they are equal."""
    square = (found.double() - wanted.double()).square().mean()
    return float(-10 * torch.log10(square))
