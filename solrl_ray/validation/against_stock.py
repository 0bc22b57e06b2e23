"""Compares our model with the stock pipeline: text, one forward at each of its states, one picture."""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from solrl_ray import models
from solrl_ray.sampling.schedules import sigmas
from solrl_ray.validation import stock
from solrl_ray.validation.outcomes import Measure, at_least, at_most, info, is_true
from solrl_ray.validation.session import Session, StockRun, psnr, relative_error

FORWARD_LIMITS = {
    "bfloat16": (0.03, "one rounding is up to 2^-9 = 0.002; dozens of layers in another order may add up to some 0.01"),
    "float32": (1e-3, "a float32 rounding is up to 2^-24; on GPUs products may run in TF32, 2^-11"),
}
"""`model.dtype` → largest relative error of a velocity, and why. A wrong timestep, text or position gives 0.1 or
more.
"""
PICTURE_LIMITS = {
    "bfloat16": (30.0, "the stock pipeline rounds its state to bfloat16 after each step, ours stays in float32"),
    "float32": (50.0, "what float32 roundings leave; eight bits a channel are 59 dB"),
}
"""`model.dtype` → lowest PSNR of a picture, dB, and why. Wrongly scaled latents give less than 20."""
TEXT_LIMIT = 0.1


def text(session: Session) -> list[Measure]:
    """Encode on the CPU, as a run's text encoder does, and on the device, as the stock pipeline does."""
    started = time.perf_counter()
    model = models.load(session.config.model, "cpu", components={"text"})
    loaded = time.perf_counter()
    on_cpu = session.embed(model)
    encoded = time.perf_counter()
    again = session.embed(model)
    equal = all(one.digest == again[key].digest for key, one in on_cpu.items())
    measures = [
        info("seconds to load on the CPU", loaded - started),
        info("seconds to encode a prompt on the CPU", (encoded - loaded) / len(on_cpu)),
        is_true("a prompt encoded twice has equal bytes", equal, "embeddings are cached by content"),
    ]
    session.embeddings = on_cpu
    if session.device.type == "cuda":
        del model
        session.embeddings = session.embed(session.load("text"))
        errors = [
            relative_error(tensor.float(), on_cpu[key].tensors[name].float())
            for key, one in session.embeddings.items()
            for name, tensor in one.tensors.items()
            if tensor.is_floating_point()
        ]
        why = "other kernels round otherwise; encoders are deep, and one wrong token gives more"
        measures.append(at_most("relative error of the GPU's embedding to the CPU's", max(errors), TEXT_LIMIT, why))
    return measures


def stock_picture(session: Session) -> list[Measure]:
    """Draw a picture with the stock pipeline, for comparison."""
    config = session.config.model
    bare = models.load(config, "cpu", components=())
    noise, prompt = session.noise(bare), session.prompts[0]
    found = stock.run(config, session.stock_path, session.device, prompt.text, bare, noise, session.steps)
    session.stock = found
    session.pictures["stock"] = [found.picture[0]]
    own = sigmas(config.schedule, session.steps, bare.image_tokens)
    apart = max(abs(a - b) for a, b in zip(own.tolist(), found.sigmas, strict=True))
    started = torch.equal(found.states[0], noise.to(found.states[0])) or relative_error(found.states[0], noise) < 0.01
    return [
        info("scheduler", found.scheduler + (f", in place of {found.replaced}" if found.replaced else "")),
        info("sigmas of model.schedule beside its own, largest difference", apart),
        is_true("begins with our noise", started, "else two pictures are compared that have nothing in common"),
        is_true("finite picture with contrast", bool(found.picture.std() > 1e-3), "else nothing is compared"),
    ]


def load(session: Session) -> list[Measure]:
    """Load transformer and decoder with the product's loader."""
    session.model = session.load("transformer", "vae")
    parameters = sum(parameter.numel() for parameter in session.model.transformer.parameters())
    return [
        info("transformer", type(session.model.transformer).__name__),
        info("parameters of the transformer", parameters),
        info("latent shape", " × ".join(map(str, session.model.latent_shape))),
        info("decoder", type(session.model.decoder).__name__),
    ]


@torch.no_grad()
def forward(session: Session) -> list[Measure]:
    """Our velocity at each state of the stock pipeline, compared with its own."""
    model, found = session.loaded, _stock(session)
    embedding = model.batch_embeddings([session.embeddings[session.prompts[0].id]])
    own, rounded, largest = [], [], []
    for sigma, state, wanted in zip(found.sigmas, found.states, found.velocities, strict=False):
        state = state.to(session.device)
        own.append(relative_error(model.velocity(state, sigma, embedding).cpu(), wanted))
        velocity = model.velocity(state, stock.rounded_sigma(session.config.model, sigma), embedding).cpu()
        rounded.append(relative_error(velocity, wanted))
        largest.append(float((velocity - wanted).abs().max()))
    limit, why = FORWARD_LIMITS[session.config.model.dtype]
    return [
        at_most("relative error of the first velocity", rounded[0], limit, why),
        at_most("largest relative error of all steps", max(rounded), limit, why),
        info("largest error of an element", max(largest)),
        info("largest relative error with sigma as ours rounds it", max(own)),
        info("standard deviation of the stock velocity", float(found.velocities[0].std())),
    ]


@torch.no_grad()
def picture(session: Session) -> list[Measure]:
    """Our picture from the same noise on the same noise levels; and our decoder alone on the stock latents."""
    model, found = session.loaded, _stock(session)
    embedding = model.batch_embeddings([session.embeddings[session.prompts[0].id]])
    latents = session.noise(model).to(session.device)
    for sigma, following in pairwise(found.sigmas):
        latents = latents + (following - sigma) * model.velocity(latents, sigma, embedding)
    ours, decoded = model.decode(latents).cpu(), model.decode(found.final.to(session.device)).cpu()
    session.pictures["ours, same noise"] = [ours[0]]
    limit, why = PICTURE_LIMITS[session.config.model.dtype]
    return [
        at_least("PSNR of the picture, dB", psnr(ours, found.picture), limit, why),
        at_least("PSNR of our decoder on the stock latents, dB", psnr(decoded, found.picture), limit, why),
        info("largest error of a pixel, of 0 to 1", float((ours - found.picture).abs().max())),
        info("relative error of the picture", relative_error(ours, found.picture)),
        info("relative error of the clean latents", relative_error(latents.cpu(), found.final)),
    ]


def _stock(session: Session) -> StockRun:
    assert session.stock is not None
    return session.stock
