"""The ready model configurations, on the published architectures without their weights, give the published numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import architectures
import full_size
import model_shapes
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import nn

from solrl_ray import models
from solrl_ray.config.checks import check
from solrl_ray.config.compiled_learner import activation_memory
from solrl_ray.config.loading import load
from solrl_ray.config.objectives import share_of
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError
from solrl_ray.models import decoders
from solrl_ray.models.components import blocks
from solrl_ray.models.shapes import shipped
from solrl_ray.planning import model_facts
from solrl_ray.quantization.planning import plan
from solrl_ray.sampling.schedules import sigmas
from tests.support.small import CONFIGS

SET = "prompts={train: builtin:testbed/prompts/train.txt, heldout: builtin:testbed/prompts/heldout.txt}"
SD3_MEDIUM = architectures.SD3 | {
    "num_layers": 24,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "pos_embed_max_size": 384,
    "dual_attention_layers": list(range(13)),
}
KL = architectures.kl_autoencoder(1.0, 0.0)


def files(model: str) -> list[Path]:
    """Method first, then the model, whose choices win."""
    return [CONFIGS / "methods/sol_rl.yaml", CONFIGS / f"models/{model}.yaml", CONFIGS / "rewards/testbed_clip.yaml"]


def configuration(model: str, *overrides: str) -> Config:
    config = load(files(model), [SET, *overrides])
    check(config)
    return config


@dataclass(frozen=True, kw_only=True)
class Published:
    pipeline: str
    transformer: tuple[str, dict[str, Any]]
    vae: dict[str, Any]
    latent_shape: tuple[int, ...]
    image_tokens: int
    lora_modules: int
    lora_parameters: int
    quantized: int
    """Linears; of the published scope, but for what the YAML says."""
    all_blocks: int
    """Linears of the wide scope."""
    learner: tuple[int, float, float]
    """Micro-batch, gradient clip, share of activations that an eager learner keeps: 0 is gradient checkpointing."""
    solver: str
    timesteps: int
    """Trained of 10."""


SD3_CLASSES = ("StableDiffusion3Pipeline", "SD3Transformer2DModel")
PUBLISHED = {
    "flux1_dev": Published(
        pipeline="FluxPipeline",
        transformer=("FluxTransformer2DModel", architectures.FLUX),
        vae=KL,
        latent_shape=(1024, 64),
        image_tokens=1024,
        # 19 double blocks × 4 and 38 single ones × 3, each 32 · (3072 + 3072).
        lora_modules=190,
        lora_parameters=37_355_520,
        # Double: 4 + 4 of attention, 2 + 2 of feed-forward. Single: 3 of attention, 2 of feed-forward.
        quantized=19 * 12 + 38 * 5,
        all_blocks=19 * 12 + 38 * 5,
        learner=(12, 1.0, 0),
        solver="dpm2",
        timesteps=4,
    ),
    "sd35_large": Published(
        pipeline=SD3_CLASSES[0],
        transformer=(SD3_CLASSES[1], architectures.SD3),
        vae=KL,
        latent_shape=(16, 128, 128),
        image_tokens=4096,
        # 8 a block, without the last block's to_add_out, each 32 · (2432 + 2432).
        lora_modules=303,
        lora_parameters=303 * 32 * 4864,
        quantized=76,
        # Both streams' attention and feed-forward; the last block drops the text after its attention.
        all_blocks=37 * 12 + 9,
        learner=(4, 0.002, 1),
        solver="dpm2",
        timesteps=6,
    ),
    "sd35_medium": Published(
        pipeline=SD3_CLASSES[0],
        transformer=(SD3_CLASSES[1], SD3_MEDIUM),
        vae=KL,
        latent_shape=(16, 64, 64),
        image_tokens=1024,
        lora_modules=191,
        lora_parameters=191 * 32 * 3072,
        quantized=48,
        all_blocks=23 * 12 + 9 + 13 * 4,
        learner=(9, 1.0, 1),
        solver="dpm2",
        timesteps=9,
    ),
    "sana_1600m": Published(
        pipeline="SanaPipeline",
        transformer=("SanaTransformer2DModel", architectures.SANA),
        vae=architectures.DC_AE,
        latent_shape=(32, 32, 32),
        image_tokens=1024,
        lora_modules=160,
        lora_parameters=22_937_600,
        quantized=40,
        all_blocks=20 * 10,
        learner=(16, 1.0, 1),
        solver="euler",
        timesteps=6,
    ),
}

OURS = {
    "qwen_image": Published(
        pipeline="QwenImagePipeline",
        transformer=("QwenImageTransformer2DModel", architectures.QWEN_IMAGE),
        vae=architectures.QWEN_IMAGE_VAE,
        latent_shape=(1024, 64),
        image_tokens=1024,
        # 60 blocks × 8, each 32 · (3072 + 3072).
        lora_modules=480,
        lora_parameters=480 * 32 * 6144,
        # 4 + 4 of attention, 2 + 2 of feed-forward.
        quantized=60 * 12,
        all_blocks=60 * 12,
        learner=(6, 1.0, 0),
        solver="dpm2",
        timesteps=4,
    ),
    "z_image": Published(
        pipeline="ZImagePipeline",
        transformer=("ZImageTransformer2DModel", architectures.Z_IMAGE),
        vae=KL,
        latent_shape=(16, 64, 64),
        image_tokens=1024,
        # 30 blocks and 2 + 2 refiners × 4, each 32 · (3840 + 3840).
        lora_modules=136,
        lora_parameters=136 * 32 * 7680,
        # 4 of attention, 3 of feed-forward; not in the two refiners of the text.
        quantized=32 * 7,
        all_blocks=34 * 7,
        learner=(12, 1.0, 0),
        solver="dpm2",
        timesteps=4,
    ),
}
"""Of models for which nobody published settings: what their files say."""


@pytest.mark.parametrize("name", [*PUBLISHED, *OURS])
def test_a_ready_configuration_gives_the_published_numbers(name: str, tmp_path: Path) -> None:
    published = (PUBLISHED | OURS)[name]
    class_name, settings = published.transformer
    texts = {f"text_encoder{n}": text for n, text in zip(("", "_2", "_3"), model_shapes.TEXTS[name], strict=False)}
    classes = {part: ["transformers", kind.__name__] for part, (kind, _) in texts.items()}
    for part, content in {
        "model_index.json": {"_class_name": published.pipeline, "transformer": ["diffusers", class_name]} | classes,
        "transformer/config.json": {"_class_name": class_name, **settings},
        "vae/config.json": published.vae,
        **{f"{part}/config.json": own for part, (_, own) in texts.items()},
    }.items():
        (tmp_path / part).parent.mkdir(exist_ok=True)
        (tmp_path / part).write_text(json.dumps(content))
    config = configuration(name, f"model.path={tmp_path}")

    facts = model_facts.model_facts(config)
    known = shipped(configuration(name).model)
    assert known is not None
    assert facts.text_parameters == sum(known.texts)
    assert facts.latent_shape == published.latent_shape
    assert models.load(config.model, "cpu", components=()).image_tokens == published.image_tokens
    assert (facts.lora_modules, facts.lora_parameters) == (published.lora_modules, published.lora_parameters)
    skeleton = models.family(config.model).skeleton(config.model)
    linears = {path: module for path, module in skeleton.named_modules() if isinstance(module, nn.Linear)}
    assert len(plan(linears, "nvfp4-emulated", config.model.quantization).quantized) == published.quantized
    wide = load([*files(name), CONFIGS / "scopes/all_blocks.yaml"], [SET]).model.quantization
    assert len(plan(linears, "fp8", wide).quantized) == published.all_blocks

    learner = config.learner
    assert (learner.micro_batch, learner.gradient_clip, activation_memory(config)) == published.learner
    assert config.rollout.solver == published.solver
    assert share_of(config.rollout.regenerate.steps, config.objective.timestep_fraction) == published.timesteps
    assert (config.model.lora.rank, config.model.lora.alpha) == (32, 64)


def test_every_model_configuration_is_checked_here_or_is_not_published() -> None:
    found = {path.stem for path in (CONFIGS / "models").glob("*.yaml")}
    edits = {"flux1_kontext_dev": "flux1_dev", "qwen_image_edit": "qwen_image"}
    edits |= {"wan21_14b_i2v": "wan21_14b", "wan22_5b_i2v": "wan22_5b"}
    edits |= {"qwen_image_2512": "qwen_image", "qwen_image_edit_2511": "qwen_image"}
    edits |= {"flux2_klein_base_9b": "flux2_klein_base_4b"}
    videos = {path.stem for path in (CONFIGS / "models").glob("*.yaml") if "frames: " in path.read_text()}
    assert found == {*PUBLISHED, *OURS, *edits, *videos, "testbed", "flux2_klein_base_4b", "chroma1_hd"}
    for name, other in edits.items():  # which share networks, layers and grid
        one, two = configuration(name).model, configuration(other).model
        assert (one.lora, one.quantization, one.schedule) == (two.lora, two.quantization, two.schedule)


def test_in_flux2_klein_all_blocks_leaves_modulation_timestep_and_embedders_alone() -> None:
    config = configuration("flux2_klein_base_4b").model
    shapes = shipped(config)
    assert shapes is not None
    wide = load([*files("flux2_klein_base_4b"), CONFIGS / "scopes/all_blocks.yaml"], [SET]).model.quantization
    tiers, own = (plan(shapes.linears, "fp8", scope).quantized for scope in (wide, config.quantization))
    assert all(name.startswith(("transformer_blocks.", "single_transformer_blocks.")) for name in tiers)
    assert set(own) == set(tiers)  # every linear of a block is wide enough for the model's own scope


@pytest.mark.parametrize("steps", [6, 10, 28, 50])
@pytest.mark.parametrize("tokens", [256, 1024, 4096, 4300, 4301, 9216])
def test_the_grid_of_flux2_klein_is_the_stock_pipelines(tokens: int, steps: int) -> None:
    u = torch.linspace(1.0, 1 / steps, steps, dtype=torch.float64)
    mu = torch.tensor(compute_empirical_mu(tokens, steps), dtype=torch.float64).exp()
    expected = mu / (mu + 1 / u - 1)
    grid = sigmas(configuration("flux2_klein_base_4b").model.schedule, steps, tokens)
    torch.testing.assert_close(grid[:-1], expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize(
    ("name", "stock"),
    [
        (
            "qwen_image",
            {"use_dynamic_shifting": True, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02},
        ),
        ("z_image", {"shift": 6.0}),
    ],
)
def test_the_grid_is_the_stock_pipelines_at_any_number_of_steps(name: str, stock: dict[str, Any]) -> None:
    for steps in (6, 10, 28):
        scheduler = FlowMatchEulerDiscreteScheduler(**stock)
        mu = calculate_shift(1024, 256, stock.get("max_image_seq_len", 4096), 0.5, stock.get("max_shift", 1.15))
        scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)], mu=mu)
        grid = sigmas(configuration(name).model.schedule, steps, 1024)
        torch.testing.assert_close(grid.float(), scheduler.sigmas, atol=1e-6, rtol=0)


def test_an_unknown_family_is_one_sentence() -> None:
    config = configuration("flux1_dev", "model.family=flux3").model
    with pytest.raises(UserError, match=r"^model\.family is 'flux3'; it must be one of chroma, flux, flux2_klein, "):
        models.load(config, "cpu", components=())


@pytest.mark.parametrize(("family", "name"), [("flux", "flux1_dev"), ("sd3", "sd35_large"), ("sana", "sana_1600m")])
def test_the_plans_estimate_of_activations_is_near_what_was_measured(family: str, name: str) -> None:
    config = load(files(name), [SET])
    kind, settings, autoencoder = full_size.TRANSFORMERS[family]
    with torch.device("meta"):
        skeleton = kind(**settings)
    sizes, factor, count = models.family(config.model).SIZES, decoders.factor(autoencoder), len(blocks(skeleton))
    measured = json.loads((CONFIGS.parent / f"benchmarks/results/learner_{family}.json").read_text())
    samples, compared = measured["micro_batch"], 0
    for side in measured["sides"]:
        kept, compiled = side["activation_memory"], side["compiled"] != "no"
        least, most = sizes.activation_bytes(config.model, settings, factor, blocks=count, compiled=compiled)
        estimate = samples * (least + kept * (most - least)) / 1e9
        found = side["peak_gb"] - side["resident_gb"]
        assert estimate == pytest.approx(found, rel=0.25, abs=1.0), side["side"]
        compared += 1
    assert compared >= 3
