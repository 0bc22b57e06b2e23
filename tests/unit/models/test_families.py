"""Every family, on a tiny checkpoint of its real classes, gives what its stock diffusers pipeline gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    ChromaPipeline,
    Flux2KleinPipeline,
    FluxPipeline,
    QwenImagePipeline,
    SanaPipeline,
    SanaVideoPipeline,
    StableDiffusion3Pipeline,
    WanPipeline,
    ZImagePipeline,
)
from torch import Tensor
from torch.nn import functional

from solrl_ray import models
from solrl_ray.config.schema import Decoding, Lora, Model
from solrl_ray.errors import UserError
from solrl_ray.models import family_checkpoint
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.components import blocks
from solrl_ray.policy import adapters
from solrl_ray.policy.merge import merged_weight
from solrl_ray.policy.saving import save_lora
from solrl_ray.quantization.scope import quantize_
from solrl_ray.records import PromptEmbedding, SampleShape
from solrl_ray.weight_sync.publication import Publication
from solrl_ray.weight_sync.publish import Publisher
from solrl_ray.weight_sync.receive import Receiver
from tests.support import tiny, tiny_qwen, tiny_wan, weight_sync
from tests.support.tensors import randn as noise

TEXTS = ["a red square", "two blue circles"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A tiny checkpoint and how its stock pipeline is asked for a picture that ours can equal."""

    name: str
    build: Callable[[Path], Path]
    pipeline: Any
    targets: list[str]
    call: dict[str, Any]
    """Arguments of the stock call beside prompt, size, steps and latents."""
    encoded: Callable[[Any, str], dict[str, Tensor]]
    """What the stock pipeline's `encode_prompt` makes of a text, by our names."""
    limits: dict[str, int]
    """Tokens that each tokenizer keeps."""
    given: Callable[[Tensor, SampleShape], Tensor] = lambda latents, _: latents
    """Our latents as the stock call takes them."""
    resolution: int = tiny.RESOLUTION
    frames: int | None = None
    version: str = ""
    """Of a checkpoint, if there are several of the family."""

    @property
    def shape(self) -> SampleShape:
        return SampleShape(self.resolution, self.resolution, self.frames or 0)

    def config(self, path: Path, **changes: Any) -> Model:
        lora = Lora(rank=4, alpha=10.0, targets=self.targets)
        fields = {"family": self.name, "lora": lora, "resolution": self.resolution, "frames": self.frames}
        fields |= tiny_wan.OWN if self.name == "wan" else {"guidance": 2.5} if self.name == "flux" else {}
        return tiny.model_config(path, **(fields | changes))

    def stock(self, path: Path) -> Any:
        pipeline = self.pipeline.from_pretrained(path)
        for part in pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval()
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def draw(self, pipeline: Any, latents: Tensor, shape: SampleShape | None = None, **arguments: Any) -> Tensor:
        shape = shape or self.shape
        frames = {models.FAMILIES[self.name].FRAMES: shape.frames} if shape.frames else {}
        made = pipeline(
            prompt=TEXTS,
            height=shape.height,
            width=shape.width,
            num_inference_steps=3,
            latents=self.given(latents.clone(), shape),
            max_sequence_length=tiny.T5_TOKENS,
            output_type="pt",
            **(frames | self.call | arguments),
        )
        drawn: Tensor = made.frames.transpose(1, 2) if self.frames else made.images
        return drawn


def encoded_by_flux(pipeline: Any, text: str) -> dict[str, Tensor]:
    sequence, pooled, _ = pipeline.encode_prompt(text, text, max_sequence_length=tiny.T5_TOKENS)
    return {"prompt_embeds": sequence, "pooled_prompt_embeds": pooled}


def encoded_by_chroma(pipeline: Any, text: str) -> dict[str, Tensor]:
    sequence, _, mask, *_ = pipeline.encode_prompt(text, max_sequence_length=tiny.T5_TOKENS)
    return {"prompt_embeds": sequence, "prompt_attention_mask": mask}


def encoded_by_sd3(pipeline: Any, text: str) -> dict[str, Tensor]:
    sequence, _, pooled, _ = pipeline.encode_prompt(text, text, text, max_sequence_length=tiny.T5_TOKENS)
    return {"prompt_embeds": sequence, "pooled_prompt_embeds": pooled}


def encoded_by_sana(pipeline: Any, text: str) -> dict[str, Tensor]:
    sequence, mask, _, _ = pipeline.encode_prompt(text, False, max_sequence_length=tiny.T5_TOKENS)
    return {"prompt_embeds": sequence, "prompt_attention_mask": mask}


def encoded_by_klein(pipeline: Any, text: str) -> dict[str, Tensor]:
    sequence, _ = pipeline.encode_prompt(text, max_sequence_length=tiny.T5_TOKENS)
    return {"prompt_embeds": sequence}


def encoded_by_qwen_image(pipeline: Any, text: str) -> dict[str, Tensor]:
    sequence, _ = pipeline.encode_prompt(text, max_sequence_length=tiny.T5_TOKENS)
    return filled_up(sequence, tiny.T5_TOKENS)


def encoded_by_z_image(pipeline: Any, text: str) -> dict[str, Tensor]:
    (sequence,), _ = pipeline.encode_prompt(text, None, False, max_sequence_length=tiny.T5_TOKENS)
    return filled_up(sequence[None], 32)


def encoded_by_wan(pipeline: Any, text: str) -> dict[str, Tensor]:
    sequence, _ = pipeline.encode_prompt(text, None, False, max_sequence_length=tiny.T5_TOKENS)
    return {"prompt_embeds": sequence}


def filled_up(sequence: Tensor, tokens: int) -> dict[str, Tensor]:
    missing = tokens - sequence.shape[1]
    mask = functional.pad(torch.ones(sequence.shape[:2]), (0, missing))
    return {"prompt_embeds": functional.pad(sequence, (0, 0, 0, missing)), "prompt_embeds_mask": mask}


FAMILIES = [
    *(
        Family(
            name="flux",
            version=version,
            build=partial(tiny.build_pipeline, guidance_embeds=bool(version), tiny_vae=bool(version)),
            pipeline=FluxPipeline,
            targets=["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "proj_mlp"],
            call={"guidance_scale": 2.5},
            encoded=encoded_by_flux,
            limits={"tokenizer": tiny.CLIP_TOKENS, "tokenizer_2": tiny.T5_TOKENS},
        )
        for version in ("", ", guided and with the tiny VAE")
    ),
    Family(
        name="chroma",
        build=tiny.build_chroma,
        pipeline=ChromaPipeline,
        targets=["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "proj_mlp"],
        call={"guidance_scale": 1.0},
        encoded=encoded_by_chroma,
        limits={"tokenizer": tiny.T5_TOKENS},
    ),
    Family(
        name="sd3",
        build=tiny.build_sd3,
        pipeline=StableDiffusion3Pipeline,
        targets=["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.to_add_out"],
        call={"guidance_scale": 1.0},
        encoded=encoded_by_sd3,
        limits={"tokenizer": tiny.CLIP_TOKENS, "tokenizer_2": tiny.CLIP_TOKENS, "tokenizer_3": tiny.T5_TOKENS},
    ),
    Family(
        name="sana",
        build=tiny.build_sana,
        pipeline=SanaPipeline,
        # The feed-forward too, whose factors are saved as convolutions.
        targets=["to_q", "to_k", "to_v", "to_out.0", "conv_inverted", "conv_point"],
        call={"guidance_scale": 1.0, "complex_human_instruction": None, "use_resolution_binning": False},
        encoded=encoded_by_sana,
        limits={"tokenizer": tiny.T5_TOKENS},
        resolution=32,
    ),
    Family(
        name="flux2_klein",
        build=tiny.build_flux2_klein,
        pipeline=Flux2KleinPipeline,
        targets=["to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj"],
        call={"guidance_scale": 1.0},
        encoded=encoded_by_klein,
        given=lambda latents, shape: latents.transpose(1, 2).unflatten(2, (shape.height // 4, shape.width // 4)),
        limits={"tokenizer": tiny.T5_TOKENS},
    ),
    Family(
        name="qwen_image",
        build=tiny_qwen.build_qwen_image,
        pipeline=QwenImagePipeline,
        targets=["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "to_add_out", "img_mlp.net.0.proj", "txt_mlp.net.2"],
        call={"true_cfg_scale": 1.0},
        encoded=encoded_by_qwen_image,
        limits={"tokenizer": tiny.T5_TOKENS},
    ),
    Family(
        name="sana_video",
        build=tiny_wan.build_sana_video,
        pipeline=SanaVideoPipeline,
        targets=["to_q", "to_k", "to_v", "to_out.0", "conv_inverted", "conv_point"],
        call={"guidance_scale": 1.0, "complex_human_instruction": None, "use_resolution_binning": False},
        encoded=encoded_by_sana,
        limits={"tokenizer": tiny.T5_TOKENS},
        resolution=32,
        frames=tiny_wan.FRAMES,
    ),
    Family(
        name="z_image",
        build=tiny_qwen.build_z_image,
        pipeline=ZImagePipeline,
        targets=["to_q", "to_k", "to_v", "to_out.0", "feed_forward.w1", "feed_forward.w2"],
        call={"guidance_scale": 0.0},
        encoded=encoded_by_z_image,
        limits={"tokenizer": tiny.T5_TOKENS},
    ),
    *(
        Family(
            name="wan",
            version=version,
            build=partial(tiny_wan.build_wan, version=version),
            pipeline=WanPipeline,
            targets=["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"],
            call={"guidance_scale": 1.0},
            encoded=encoded_by_wan,
            limits={"tokenizer": tiny.T5_TOKENS},
            frames=tiny_wan.FRAMES,
        )
        for version in ("2.1", "2.2")
    ),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: f"{family.name}{family.version}")
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def path(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.build(tmp_path_factory.mktemp(family.name) / "pipeline")


@pytest.fixture(scope="module")
def model(family: Family, path: Path) -> DiffusionModel:
    return models.load(family.config(path), "cpu")


def batch_of(model: DiffusionModel, texts: list[str]) -> dict[str, Tensor]:
    encoded = zip(texts, model.encode(texts), strict=True)
    return model.batch_embeddings([PromptEmbedding(prompt_id=t, tensors=e, digest=t) for t, e in encoded])


def sampled(model: DiffusionModel, start: Tensor, sigmas: Tensor) -> Tensor:
    """Euler steps on the stock scheduler's own grid."""
    batch, latents = batch_of(model, TEXTS), start
    with torch.no_grad():
        for sigma, following in pairwise(sigmas.tolist()):
            latents = latents + (following - sigma) * model.velocity(latents, sigma, batch)
        return model.decode(latents)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 1), (1, 2)])
def test_sampling_and_decoding_equal_the_stock_pipeline(
    family: Family, path: Path, model: DiffusionModel, height: int, width: int
) -> None:
    shape = SampleShape(height * family.resolution, width * family.resolution, family.frames or 0)
    model = model.of_shape(shape)
    stock, start = family.stock(path), noise(2, *model.latent_shape)
    expected = family.draw(stock, start, shape)
    images = sampled(model, start, stock.scheduler.sigmas)
    assert images.shape == (2, 3, *shape.dims)
    assert images.dtype == torch.float32
    assert expected.std() > 0.01
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)


def test_embeddings_are_those_of_the_stock_pipeline(family: Family, path: Path, model: DiffusionModel) -> None:
    stock = family.stock(path)
    for text, ours in zip(TEXTS, model.encode(TEXTS), strict=True):
        with torch.no_grad():
            expected = family.encoded(stock, text)
        assert ours.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(ours[name], tensor[0].to(torch.float32)), name


def test_what_is_cut_off_is_counted_by_tokenizer(family: Family, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_checkpoint, "COUNTED", 2)  # in parts, the last one shorter
    config = family.config(path)
    long = "a b c d e f g h i j k l m n o p q r s t u v w x y z a b c d e f g h i j k l m n o p q r s t u v w x y z"
    found = type(models.load(config, "cpu", components=())).truncated(config, [long, "a", f"{long} a"])
    assert {cut.tokenizer: cut.texts for cut in found} == dict.fromkeys(family.limits, (long, f"{long} a"))
    assert {cut.tokenizer: cut.limit for cut in found} == family.limits


def test_sizes_before_loading_are_those_of_the_loaded_model(family: Family, path: Path, model: DiffusionModel) -> None:
    skeleton = models.family(model.config).skeleton(model.config)
    loaded = {name: (p.shape, p.device.type) for name, p in model.transformer.named_parameters()}
    assert {name: (p.shape, "cpu") for name, p in skeleton.named_parameters()} == loaded
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}
    bare = models.load(model.config, "cpu", components=())
    assert (bare.latent_shape, bare.image_tokens) == (model.latent_shape, model.image_tokens)


def test_every_layer_that_lora_trains_is_in_a_block_that_is_compiled(family: Family, model: DiffusionModel) -> None:
    inside = {id(module) for block in blocks(model.transformer) for module in block.modules()}
    named = model.transformer.named_modules()
    targets = [module for name, module in named if name.endswith(tuple(f".{end}" for end in family.targets))]
    assert targets
    assert all(id(module) in inside for module in targets)


def test_images_are_decoded_in_micro_batches_of_the_configured_size(family: Family, path: Path) -> None:
    whole = models.load(family.config(path), "cpu", components={"vae"})
    parts = models.load(family.config(path, decoding=Decoding(micro_batch=2)), "cpu", components={"vae"})
    sizes: list[int] = []
    decode = parts._module("vae").decode

    def counted(z: Tensor, **arguments: Any) -> Any:
        sizes.append(len(z))
        return decode(z, **arguments)  # type: ignore[operator]

    parts._module("vae").decode = counted  # type: ignore[assignment]
    latents = noise(3, *whole.latent_shape)
    torch.testing.assert_close(parts.decode(latents), whole.decode(latents), atol=2e-6, rtol=0)
    assert sizes == [2, 1]


def test_bfloat16_stays_close_to_float32(family: Family, path: Path, model: DiffusionModel) -> None:
    low = models.load(family.config(path, dtype="bfloat16"), "cpu")
    latents = noise(2, *model.latent_shape)
    with torch.no_grad():
        exact = model.velocity(latents, 0.6, batch_of(model, TEXTS))
        rough = low.velocity(latents, 0.6, batch_of(low, TEXTS))
    assert rough.dtype == torch.float32
    assert (rough - exact).norm() < 0.06 * exact.norm()


def test_a_learners_bfloat16_is_its_samplers(family: Family, path: Path) -> None:
    """Samples are learned from as they were made: the ratio of an unchanged policy is 1. On a GPU autocast also keeps
    norms in float32, which rounds less than a sampler does.
    """
    low = models.load(family.config(path, dtype="bfloat16"), "cpu", components={"text", "transformer"})
    adapters.attach(low.transformer, low.config.lora, run_seed=1)
    latents, texts = noise(2, *low.latent_shape), batch_of(low, TEXTS)
    with torch.no_grad():
        made = low.velocity(latents, 0.6, texts)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(low.velocity(latents, 0.6, texts), made)


def test_a_checkpoint_of_another_family_is_refused(family: Family, path: Path) -> None:
    other = "sd3" if family.name == "flux" else "flux"
    with pytest.raises(
        UserError, match=rf"^model\.path is .*'{family.pipeline.__name__}', but model\.family '{other}'"
    ):
        models.load(family.config(path, family=other), "cpu", components=())


def test_one_sigma_a_sample_gives_what_each_sigma_gives_alone(model: DiffusionModel) -> None:
    latents, batch = noise(2, *model.latent_shape), batch_of(model, TEXTS[:1])
    with torch.no_grad():
        both = model.velocity(latents, torch.tensor([0.2567, 0.75]), batch)
        alone = [model.velocity(latents[i : i + 1], sigma, batch) for i, sigma in enumerate((0.2567, 0.75))]
    torch.testing.assert_close(both, torch.cat(alone), atol=1e-5, rtol=0)
    with torch.no_grad():
        assert not torch.equal(model.velocity(latents, 0.256, batch), model.velocity(latents, 0.2567, batch))


def random_factors(model: DiffusionModel) -> dict[str, Tensor]:
    """Attaches adapters to the model for their names and shapes."""
    adapters.attach(model.transformer, model.config.lora, run_seed=1)
    factors = adapters.factors(model.transformer, "default")
    return {name: noise(*factor.shape, seed=i) * 0.2 for i, (name, factor) in enumerate(factors.items())}


def test_a_revision_is_taken_by_explorers_and_regenerators(family: Family, path: Path) -> None:
    learner, regenerator, explorer = (models.load(family.config(path), "cpu") for _ in range(3))
    config = weight_sync.config("nvfp4-emulated").model_copy(update={"model": learner.config})
    revision = Publisher.for_model(learner.transformer, config, tier="nvfp4-emulated").build(1, random_factors(learner))
    publication = Publication(revision=revision, mode="packed")
    assert quantize_(explorer.transformer, "nvfp4-emulated", explorer.config.quantization).layers
    latents, batch = noise(2, *learner.latent_shape), batch_of(learner, TEXTS)
    with torch.no_grad():
        before = regenerator.velocity(latents, 0.5, batch)
        for role, model in (("regenerator", regenerator), ("explorer", explorer)):
            bound, digest = Receiver(model.transformer).apply(publication.payload(role))
            expected = revision.manifest.expected[role]
            assert (bound, digest) == (expected.modules, expected.digest)
        exact, preview = (model.velocity(latents, 0.5, batch) for model in (regenerator, explorer))
    moved = (exact - before).norm()
    assert moved > 0.02 * before.norm()
    # The preview follows the policy, up to the error of four bits.
    assert (preview - exact).norm() < 0.5 * exact.norm()


def test_gradient_checkpointing_changes_no_gradient(family: Family, path: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = models.load(family.config(path), "cpu")
        adapters.attach(model.transformer, model.config.lora, run_seed=1)
        batch = batch_of(model, TEXTS)
        if checkpointing:
            model.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
        model.velocity(noise(2, *model.latent_shape), torch.tensor([0.3, 0.9]), batch).square().mean().backward()
        trained = adapters.parameters(model.transformer, "default").values()
        gradients.append([parameter.grad for parameter in trained])
    assert any(gradient.abs().max() > 0 for gradient in gradients[0])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, atol=1e-6, rtol=1e-4)


def test_a_lora_saved_by_us_loads_in_the_stock_pipeline_as_what_we_merge(
    family: Family, path: Path, tmp_path: Path
) -> None:
    model = models.load(family.config(path), "cpu")
    lora = model.config.lora
    weights = {name: module.weight for name, module in model.transformer.named_modules() if hasattr(module, "weight")}
    factors = random_factors(model)
    save_lora(tmp_path / "lora", factors, lora, models.FAMILIES[model.config.family].CONVOLUTIONS)

    stock, start = family.stock(path), noise(2, *model.latent_shape)
    before = family.draw(stock, start)
    stock.load_lora_weights(tmp_path / "lora")
    (adapter,) = stock.transformer.peft_config.values()
    assert (adapter.r, adapter.lora_alpha) == (4, 4)
    after = family.draw(stock, start)

    merged = models.load(family.config(path), "cpu")
    touched = {name.removesuffix(".lora_A") for name in factors if name.endswith(".lora_A")}
    assert touched
    for name in touched:
        a, b = factors[f"{name}.lora_A"], factors[f"{name}.lora_B"]
        merged.transformer.get_submodule(name).weight.data = merged_weight(weights[name], a, b, 10.0 / 4)
    ours = sampled(merged, start, stock.scheduler.sigmas)
    assert (after - before).abs().max() > 0.01
    torch.testing.assert_close(ours, after, atol=1e-5, rtol=0)
