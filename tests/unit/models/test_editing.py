"""Every family that sees reference pictures gives what its stock pipeline gives for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    QwenImageEditPlusPipeline,
    WanImageToVideoPipeline,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image
from torch import Tensor

from solrl_ray import models
from solrl_ray.config.guidance import Cfg
from solrl_ray.config.schema import Decoding, Model
from solrl_ray.errors import UserError
from solrl_ray.models.references import SeesReferences
from solrl_ray.models.stock_call import StockCall
from solrl_ray.prompts.encoding import encode_prompts
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.records import REFERENCE_TOKENS, REFERENCES, PromptEmbedding
from tests.support import tiny, tiny_qwen, tiny_wan
from tests.support.editing import write_prompts

TEXT, NEGATIVE_TEXT = "make it red", "grey"
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Family:
    """A tiny checkpoint and its stock pipeline."""

    name: str
    build: Callable[[Path], Path]
    pipeline: Any
    count: int = 1
    """Reference pictures."""
    size: int = tiny.RESOLUTION
    tokens: int = tiny.T5_TOKENS
    frames: int = 0
    variant: str = ""
    given_frames: int = 1
    """Latent frames of the picture that a video follows; if there are several, 4 channels say which are given."""
    given: Callable[[Tensor], Tensor] = lambda latents: latents
    """Our latents as the stock call takes them."""

    def config(self, path: Path, **changes: Any) -> Model:
        fields = {"family": self.name, "references": self.count, "resolution": self.size}
        fields |= tiny_wan.OWN if self.frames else {}
        return tiny.model_config(path, **fields | {"max_sequence_length": self.tokens} | changes)

    def pictures(self, seed: int = 0) -> Tensor:
        """uint8 [count, 3, size, size]."""
        shape = self.count, 3, self.size, self.size
        return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).byte()

    def stock(self, path: Path) -> Any:
        pipeline = self.pipeline.from_pretrained(path)
        for part in pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval()
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def build_klein(folder: Path) -> Path:
    """With larger weights, so that attention sees the references among the sample's tokens."""
    tiny.build_flux2_klein(folder)
    transformer = Flux2Transformer2DModel.from_pretrained(folder / "transformer")
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.mul_(3)
    transformer.save_pretrained(folder / "transformer")
    return folder


def build_2511(folder: Path) -> Path:
    return tiny_qwen.build_qwen_image_edit(folder, zero_cond_t=True)


def as_cells(latents: Tensor) -> Tensor:
    return latents.transpose(1, 2).unflatten(2, (16, 16))


FAMILIES = [
    Family("flux_kontext", tiny.build_kontext, FluxKontextPipeline),
    Family("flux2_klein", build_klein, Flux2KleinPipeline, size=64, given=as_cells),
    Family("flux2_klein", build_klein, Flux2KleinPipeline, 2, size=64, given=as_cells),
    Family("qwen_image_edit", tiny_qwen.build_qwen_image_edit, QwenImageEditPlusPipeline, size=32, tokens=600),
    Family("qwen_image_edit", tiny_qwen.build_qwen_image_edit, QwenImageEditPlusPipeline, 2, size=32, tokens=600),
    Family("qwen_image_edit", build_2511, QwenImageEditPlusPipeline, 2, size=32, tokens=600, variant="-2511"),
    Family(
        "wan21_i2v",
        tiny_wan.build_wan21_i2v,
        WanImageToVideoPipeline,
        frames=tiny_wan.FRAMES,
        tokens=512,
        given_frames=3,
    ),
    Family("wan_i2v", tiny_wan.build_wan_i2v, WanImageToVideoPipeline, frames=tiny_wan.FRAMES),
]


@pytest.fixture(autouse=True)
def pictures_of_the_samples_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock pipeline of Qwen-Image-Edit brings references to a megapixel, which takes minutes on a CPU."""
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 32 * 32)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: f"{family.name}-{family.count}{family.variant}")
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def path(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.build(tmp_path_factory.mktemp(family.name) / "pipeline")


def test_references_at_noise_level_0_are_not_those_at_the_samples_level(tmp_path: Path) -> None:
    """Else the comparison with the stock pipeline of 2511 would show nothing that 2509's does not."""
    one, other = (tiny_qwen.build_qwen_image_edit(tmp_path / str(zero), zero_cond_t=zero) for zero in (False, True))
    family = next(each for each in FAMILIES if each.variant)
    velocities = []
    for path in (one, other):
        model, given = loaded(family.config(path)), family.pictures()
        start = torch.randn(1, *model.latent_shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            velocities.append(model.velocity(start, 0.7, model.batch_embeddings([embedded(model, given)])))
    assert (velocities[0] - velocities[1]).abs().max() > 1e-3


def as_files(given: Tensor) -> list[Image.Image]:
    return [Image.fromarray(np.ascontiguousarray(one.permute(1, 2, 0).numpy())) for one in given]


def embedded(model: SeesReferences, given: Tensor) -> PromptEmbedding:
    (positive,) = model.encode_seeing([TEXT], [given])
    made = PromptEmbedding(prompt_id="p", tensors=positive, digest="p")
    if not model.config.cfg.is_on:
        return made
    (negative,) = model.encode_seeing([model.config.cfg.negative_prompt], [given])
    return made.against(PromptEmbedding(prompt_id="n", tensors=negative, digest="n"))


def loaded(config: Model) -> SeesReferences:
    model = models.load(config, "cpu")
    assert isinstance(model, SeesReferences)
    return model


def sampled(model: SeesReferences, given: Tensor, start: Tensor, sigmas: Tensor) -> Tensor:
    """Euler steps on the stock scheduler's own grid."""
    batch, latents = model.batch_embeddings([embedded(model, given)]), start
    with torch.no_grad():
        for sigma, following in pairwise(sigmas.tolist()):
            latents = latents + (following - sigma) * model.velocity(latents, sigma, batch)
        return model.decode(latents)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_an_edited_picture_equals_the_stock_pipelines(family: Family, path: Path, scale: float) -> None:
    negative = "" if family.name == "flux2_klein" else NEGATIVE_TEXT  # its pipeline takes no other
    cfg = Cfg(scale=scale, negative_prompt=negative) if scale > 1 else Cfg()
    model, stock, given = loaded(family.config(path, cfg=cfg)), family.stock(path), family.pictures()
    start = torch.randn(1, *model.latent_shape, generator=torch.Generator().manual_seed(1))
    files = as_files(given)
    expected = stock(
        prompt=TEXT,
        image=files if family.count > 1 else files[0],
        latents=family.given(start.clone()),
        output_type="pt",
        **StockCall(model=model.config, steps=STEPS, solver="euler").call,
    )
    expected = expected.frames.transpose(1, 2) if family.frames else expected.images
    images = sampled(model, given, start, stock.scheduler.sigmas)
    assert expected.std() > 0.01
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)
    others = sampled(model, family.pictures(seed=7), start, stock.scheduler.sigmas)
    assert (others - images).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "height", "width"), [("flux_kontext", 16, 32), ("flux2_klein", 64, 96), ("qwen_image_edit", 32, 64)]
)
def test_an_edited_picture_that_is_not_square_equals_the_stock_pipelines(
    name: str, height: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In squares, rows and columns of pixels, cells and positions may be exchanged."""
    family = next(each for each in FAMILIES if each.name == name)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", height * width)
    path = family.build(tmp_path / "pipeline")
    model, stock = loaded(family.config(path, resolution=[height, width])), family.stock(path)
    given = torch.randint(0, 256, (1, 3, height, width), generator=torch.Generator().manual_seed(0)).byte()
    start = torch.randn(1, *model.latent_shape, generator=torch.Generator().manual_seed(1))
    cells = start.transpose(1, 2).unflatten(2, (height // 4, width // 4))
    call = StockCall(model=model.config, steps=STEPS, solver="euler").call
    assert (call["height"], call["width"]) == (height, width)
    expected = stock(
        prompt=TEXT,
        image=as_files(given)[0],
        latents=cells if name == "flux2_klein" else start.clone(),
        output_type="pt",
        **call,
    ).images
    images = sampled(model, given, start, stock.scheduler.sigmas)
    assert images.shape == (1, 3, height, width)
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)


def test_references_are_prepared_at_the_height_and_width_of_the_samples(tmp_path: Path) -> None:
    family = FAMILIES[0]
    height, width = family.size, 2 * family.size
    model = loaded(family.config(family.build(tmp_path / "pipeline"), resolution=[height, width]))
    first, second = read_prompts(str(write_prompts(tmp_path / "p.jsonl", ["a", "b"], height, width)))
    pixels = [
        torch.from_numpy(np.asarray(Image.open(tmp_path / f"p-{n}-0.png")).copy()).permute(2, 0, 1)[None]
        for n in range(2)
    ]
    made = encode_prompts(model, [first, second])
    for embedding, seen in zip(made, pixels, strict=True):
        assert torch.equal(embedding[REFERENCES], seen)
        (expected,) = model.encode_seeing([TEXT], [seen])
        assert torch.equal(embedding[REFERENCE_TOKENS], expected[REFERENCE_TOKENS])
    files = [tuple(Path(each.path).read_bytes() for each in prompt.references) for prompt in (second, first)]
    swapped = encode_prompts(model, [first, second], files=files)
    assert [torch.equal(each[REFERENCES], seen) for each, seen in zip(swapped, pixels[::-1], strict=True)] == [True] * 2


def test_in_a_batch_each_prompt_is_guided_away_from_the_negative_prompt_that_saw_its_own_pictures(
    tmp_path: Path,
) -> None:
    family = FAMILIES[0]
    config = family.config(family.build(tmp_path / "pipeline"), cfg=Cfg(scale=3.0, negative_prompt=NEGATIVE_TEXT))
    model = loaded(config)
    both = []
    for number in range(2):
        given = [family.pictures(seed=number)]
        (own,), (negative,) = (model.encode_seeing([text], given) for text in (TEXT, NEGATIVE_TEXT))
        made, other = (
            PromptEmbedding(prompt_id=f"{word}{number}", tensors=tensors, digest=f"{word}{number}")
            for word, tensors in (("p", own), ("n", negative))
        )
        both.append(made.against(other))
    latents = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        together = model.velocity(latents, 0.5, model.batch_embeddings(both))
        alone = [model.velocity(latents[n : n + 1], 0.5, model.batch_embeddings([both[n]])) for n in range(2)]
        exchanged = model.velocity(latents[:1], 0.5, model.batch_embeddings([both[1]]))
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)
    assert (exchanged - alone[0]).abs().max() > 1e-3


def test_an_embedding_depends_on_its_own_picture_alone(family: Family, path: Path) -> None:
    model = loaded(family.config(path))
    one, other = family.pictures(), family.pictures(seed=3)
    together = model.encode_seeing([TEXT, "b"], [one, other], micro_batch=2)
    alone = model.encode_seeing([TEXT], [one], micro_batch=2)
    for name, tensor in alone[0].items():
        assert torch.equal(together[0][name], tensor), name
    assert not torch.equal(together[0][REFERENCE_TOKENS], together[1][REFERENCE_TOKENS])
    channels, *sides = model.latent_shape
    shape = (channels * family.count, *sides)
    if family.frames:
        shape = (channels + 4 * (family.given_frames > 1), family.given_frames, *sides[1:])
    assert together[0][REFERENCE_TOKENS].shape == shape


def test_in_bfloat16_the_latent_of_a_first_frame_is_rounded_once(tmp_path: Path) -> None:
    """As the stock pipeline's, which brings it to its scale in float32."""
    family = next(each for each in FAMILIES if each.name == "wan_i2v")
    path = family.build(tmp_path / "pipeline")
    model, given = loaded(family.config(path, dtype="bfloat16")), family.pictures()
    (encoded,) = model.encode_seeing([TEXT], [given])
    vae = AutoencoderKLWan.from_pretrained(path / "vae", torch_dtype=torch.bfloat16).eval()
    with torch.no_grad():
        latents = vae.encode((given[:, :, None].float() / 127.5 - 1).bfloat16()).latent_dist.mode()[0].float()
    mean, std = (torch.tensor(each)[:, None, None, None] for each in (vae.config.latents_mean, vae.config.latents_std))
    assert torch.equal(encoded[REFERENCE_TOKENS], ((latents - mean) / std).bfloat16())


def test_the_identity_of_embeddings_knows_the_autoencoder(family: Family, path: Path) -> None:
    identity = loaded(family.config(path)).text_identity()
    assert {"vae", "shape"} <= identity.keys()
    assert loaded(family.config(path, decoding=Decoding(tiling=True))).text_identity() != identity


def test_another_number_of_references_is_refused(family: Family, path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.references is 9"):
        models.load(family.config(path).model_copy(update={"references": 9}), "cpu", components=())


def test_the_tokens_of_pictures_count_for_the_limit_of_a_text(tmp_path: Path) -> None:
    checkpoint = tiny_qwen.build_qwen_image_edit(tmp_path / "pipeline")
    family = next(each for each in FAMILIES if each.name == "qwen_image_edit" and each.count == 2)
    model = loaded(family.config(checkpoint))
    (encoded,) = model.encode_seeing([TEXT], [family.pictures()])
    taken = int(encoded["prompt_embeds_mask"].sum())
    exact, short = (family.config(checkpoint, max_sequence_length=taken - less) for less in (0, 1))
    assert [cut.texts for cut in type(model).truncated(exact, [TEXT])] == [()]
    assert [cut.texts for cut in type(model).truncated(short, [TEXT])] == [(TEXT,)]
    (cut,) = loaded(short).encode_seeing([TEXT], [family.pictures()])
    assert torch.equal(cut["prompt_embeds"], encoded["prompt_embeds"][: taken - 1])
