"""Compares our model with the stock diffusers pipeline: text, one forward at each of its states, one picture."""

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
    "bfloat16": (0.03, "one rounding is up to 2^-9 = 0.002; dozens of layers in another order may add up to some 0.01"),
    "float32": (1e-3, "a float32 rounding is up to 2^-24; on GPUs products may run in TF32, 2^-11"),
}
"""`model.dtype` → largest relative error of a velocity, and why. A wrong timestep, text or position gives over 0.1."""
PICTURE_LIMITS = {
    "bfloat16": (30.0, "the stock pipeline rounds its state to bfloat16 after each step, ours stays in float32"),
    "float32": (50.0, "what float32 roundings leave; eight bits a channel are 59 dB"),
}
"""`model.dtype` → lowest PSNR of a picture, dB, and why. Wrongly scaled latents give less than 20."""
SIGMA_LIMIT = (1e-5, "the stock pipeline has float32 noise levels; a wrong shift gives 0.01 or more")
TEXT_LIMIT = (0.1, "other kernels round otherwise; encoders are deep, and one wrong token gives more")


@dataclass(frozen=True, slots=True)
class Measure:
    """A result of a step; with a limit it fails the step unless it holds."""

    name: str
    value: float | int | str | bool
    limit: str = ""
    """``at most 0.05``; empty if there is none."""
    why: str = ""
    """The reason of the limit."""
    holds: bool = True

    @property
    def shown(self) -> str:
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        return f"{self.value:.4g}" if isinstance(self.value, float) else f"{self.value}"


def at_most(name: str, value: float, limit: float, why: str) -> Measure:
    """NaN fails."""
    return Measure(name, value, f"at most {limit:g}", why, value <= limit)


def at_least(name: str, value: float, limit: float, why: str) -> Measure:
    """NaN fails."""
    return Measure(name, value, f"at least {limit:g}", why, value >= limit)


def is_true(name: str, value: bool, why: str) -> Measure:
    return Measure(name, value, "yes", why, value)


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
    """The model's configuration, the device, and the results of earlier steps."""

    config: Config
    device: torch.device
    steps: int
    """Solver steps of the pictures."""
    embeddings: dict[str, PromptEmbedding] = field(default_factory=dict)
    stock: StockRun | None = None
    model: DiffusionModel | None = None
    """With its decoder."""
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

    def batch(self, model: DiffusionModel) -> dict[str, Tensor]:
        """The first prompt's embedding."""
        return model.batch_embeddings([self.embeddings[PROMPTS[0].id]])

    def noise(self, model: DiffusionModel) -> Tensor:
        """Addressed, float32 [1, *latent_shape] on the CPU: the same on every machine."""
        return initial_noise([Address(run_seed=self.config.run.seed, purpose="validation")], model.latent_shape)


def text(session: Session) -> list[Measure]:
    """Encode on the CPU, as a run's text encoder does, and on the device, as the stock pipeline does."""
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
    """Draw a picture with the stock pipeline as a run's report says, but with Euler steps: its scheduler is watched."""
    from diffusers import FlowMatchEulerDiscreteScheduler  # late: it takes seconds

    config, drawing = session.config.model, session.drawing
    bare = models.load(config, "cpu", components=())
    noise, passed = session.noise(bare), list[tuple[Tensor, Tensor, Tensor]]()
    pipeline = _pipeline(session)
    own, pipeline.scheduler = pipeline.scheduler, FlowMatchEulerDiscreteScheduler(**drawing.scheduler)
    if drawing.shifts_once:
        _shift_once(pipeline.scheduler)
    step = pipeline.scheduler.step

    @functools.wraps(step)  # pipelines inspect its parameters
    def watched(model_output: Tensor, timestep: Tensor, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = sample.float().cpu(), model_output.float().cpu()
        given = step(model_output, timestep, sample, *args, **kwargs)
        passed.append((*before, given[0].float().cpu()))
        return given

    pipeline.scheduler.step = watched
    latents = bare.stock_latents(noise.clone())
    given, family = {}, models.family(config)
    keeping: AbstractContextManager[None] = nullcontext()
    if config.references and issubclass(family, SeesReferences):
        pictures = [Image.fromarray(each.transpose(1, 2, 0)) for each in session.references]
        given = {"image": pictures if len(pictures) > 1 else pictures[0]}
        keeping = family.stock_keeps_references(config.shapes[0])
    with keeping:
        called = pipeline(prompt=[TEXTS[0]], latents=latents, output_type="pt", **given, **drawing.call)
    grid = pipeline.scheduler.sigmas.double().tolist()
    picture = called.frames.transpose(1, 2) if config.frames else called.images
    found = session.stock = StockRun(grid, passed, picture.float().cpu())
    session.pictures["stock"] = [found.picture[0]]
    levels = sigmas(config.schedule, session.steps, bare.image_tokens).tolist()
    apart = max(abs(a - b) for a, b in zip(levels, grid, strict=True))
    begins = relative_error(passed[0][0], noise) < 0.01
    other = {name: own.config.get(name) for name, value in drawing.scheduler.items() if own.config.get(name) != value}
    return [
        Measure("the checkpoint's own scheduler", type(own).__name__ + (f" with {other}" if other else "")),
        at_most("largest difference of a noise level from model.schedule", apart, *SIGMA_LIMIT),
        is_true("begins with our noise", begins, "else two pictures are compared that have nothing in common"),
        is_true("finite picture with contrast", bool(found.picture.std() > 1e-3), "else nothing is compared"),
    ]


def _shift_once(scheduler: Any) -> None:
    """Have Euler's scheduler take the noise levels of UniPC with ``use_flow_sigmas``, which it then shifts."""
    take = scheduler.set_timesteps
    scheduler.set_timesteps = lambda steps, device=None, **_: take(
        sigmas=[1 - 0.999 * i / steps for i in range(steps)], device=device
    )


def _pipeline(session: Session) -> Any:
    config = session.config.model
    source = str(paths.checkpoint(config.path, "model.path"))
    pipeline = models.family(config).PIPELINE.from_pretrained(source, dtype=DTYPES[config.dtype])
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    pipeline.set_progress_bar_config(disable=True)
    if session.device.type == "cuda":
        # One part at a time, so that it needs no more memory than ours.
        pipeline.enable_model_cpu_offload(device=session.device)
    return pipeline


def load(session: Session) -> list[Measure]:
    """Load transformer and decoder with the product's loader."""
    session.model = model = session.load("transformer", "vae")
    return [
        Measure("parameters of the transformer", sum(each.numel() for each in model.transformer.parameters())),
        Measure("latent shape", " × ".join(map(str, model.latent_shape))),
        Measure("decoder", type(model.decoder).__name__),
    ]


@torch.no_grad()
def forward(session: Session) -> list[Measure]:
    """Our velocity at each state of the stock pipeline, compared with its own."""
    assert session.model
    assert session.stock
    config, found = session.drawing.model, session.stock
    model = session.model.with_guidance(config)
    embedding, errors = session.batch(model), []
    for sigma, (state, wanted, _) in zip(found.sigmas, found.passed, strict=False):
        velocity = model.velocity(state.to(session.device), _rounded(config, sigma), embedding)
        errors.append(relative_error(model.predicted(velocity.cpu()), model.predicted(wanted)))
    largest, why = FORWARD_LIMITS[config.dtype]
    limit = largest * (2 * config.cfg.scale - 1), why  # guidance weights two velocities with s and s - 1
    return [
        at_most("relative error of the first velocity", errors[0], *limit),
        at_most("largest relative error of all steps", max(errors), *limit),
    ]


def _rounded(config: Model, sigma: float) -> float:
    """The noise level that the stock pipeline's transformer gets."""
    if not models.family(config).ROUNDS_TIMESTEPS:
        return sigma
    return float(torch.tensor(1000 * sigma, dtype=torch.float32).to(DTYPES[config.dtype]) / 1000)


@torch.no_grad()
def picture(session: Session) -> list[Measure]:
    """Our picture from the same noise on the same noise levels; and our decoder alone on the stock latents."""
    assert session.model
    assert session.stock
    found, model = session.stock, session.model.with_guidance(session.drawing.model)
    embedding, latents, final = session.batch(model), session.noise(model).to(session.device), found.passed[-1][2]
    for sigma, following in pairwise(found.sigmas):
        latents = latents + (following - sigma) * model.velocity(latents, sigma, embedding)
    ends = latents.clone()  # what is given of them comes into the stock pipeline's after its last step
    model.predicted(ends).copy_(model.predicted(final))
    ours, decoded = model.decode(latents).cpu(), model.decode(ends).cpu()
    session.pictures["ours, same noise"] = [ours[0]]
    limit = PICTURE_LIMITS[session.config.model.dtype]
    return [
        at_least("PSNR of the picture, dB", psnr(ours, found.picture), *limit),
        at_least("PSNR of our decoder on the stock latents, dB", psnr(decoded, found.picture), *limit),
    ]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """L2 norm of the difference, relative to the norm of `wanted`."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def psnr(found: Tensor, wanted: Tensor) -> float:
    """Peak signal-to-noise ratio of pictures in [0, 1], dB; infinite if they are equal."""
    square = (found.double() - wanted.double()).square().mean()
    return float(-10 * torch.log10(square))
