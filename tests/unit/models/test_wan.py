"""What Wan alone has: frames, an autoencoder that decodes them one after another, checkpoints with two transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from torch import Tensor

from solrl_ray import models
from solrl_ray.config.schema import Decoding, Model
from solrl_ray.errors import UserError
from solrl_ray.models import FAMILIES
from solrl_ray.models.base import DiffusionModel
from solrl_ray.quantization import attestation
from solrl_ray.quantization.scope import quantize_
from tests.support import tiny_wan
from tests.support.families import model_config
from tests.support.sentences import names


@pytest.fixture(scope="module", params=["2.1", "2.2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_wan.build_wan(tmp_path_factory.mktemp("wan") / "pipeline", version=request.param)


def config(path: Path, **changes: Any) -> Model:
    return model_config("wan", path, **changes)


def noise(model: DiffusionModel) -> Tensor:
    return torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("frames", "latent"), [(5, 2), (9, 3), (13, 4)])
def test_latents_have_one_frame_for_the_first_and_one_for_four_others(path: Path, frames: int, latent: int) -> None:
    model = models.load(config(path, frames=frames), "cpu", components={"vae"})
    assert model.latent_shape[1] == latent
    assert model.decode(noise(model)).shape == (2, 3, frames, 16, 16)


def test_the_first_latent_frames_decode_as_they_do_in_the_whole_video(path: Path) -> None:
    model = models.load(config(path, frames=13), "cpu", components={"vae"})
    latents = noise(model)
    whole, begun = model.decode(latents), model.decode(latents[:, :, [0, 1]])
    torch.testing.assert_close(begun, whole[:, :, :5], atol=1e-6, rtol=0)
    # Not the first one alone: it is decoded otherwise than those that follow.
    assert not torch.allclose(model.decode(latents[:, :, [1]]), whole[:, :, 1:2], atol=1e-2)


def test_tiles_decode_nearly_what_is_decoded_at_once(path: Path) -> None:
    large: dict[str, Any] = {"frames": 5, "resolution": 320}
    latents = noise(models.load(config(path, **large), "cpu", components=())) * 0.1
    whole, tiled = (
        models.load(config(path, decoding=Decoding(tiling=tiling), **large), "cpu", components={"vae"}).decode(latents)
        for tiling in (False, True)
    )
    assert tiled.shape == whole.shape
    assert not torch.equal(tiled, whole)
    assert (tiled - whole).square().mean() < 0.05 * whole.var()


@pytest.mark.parametrize(("frames", "values"), [(None, "4 49"), (8, "8 5 9"), (4, "4 5"), (80, "80 77 81")])
def test_frames_that_the_autoencoder_cannot_make_are_refused(frames: int | None, values: str, path: Path) -> None:
    with pytest.raises(UserError) as refused:
        models.load(config(path, frames=frames), "cpu", components=())
    assert names(str(refused.value), "model.frames", values)


def test_noise_levels_that_the_stock_pipeline_cannot_be_told_are_refused(path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.schedule\.kind is 'linear', .*'shift'"):
        models.load(config(path, schedule={"kind": "linear"}), "cpu", components=())


def test_frames_of_a_family_of_pictures_are_refused(tiny_pipeline: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.frames is 9, .*'flux'"):
        models.load(model_config("flux", tiny_pipeline, frames=9), "cpu", components=())


def test_a_checkpoint_with_two_transformers_is_refused(path: Path, tmp_path: Path) -> None:
    index = json.loads((path / "model_index.json").read_text())
    for part in ("transformer", "vae"):
        (tmp_path / part).symlink_to(path / part)
    index["transformer_2"] = index["transformer"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"^model\.path is .*two transformers"):
        models.load(config(tmp_path), "cpu", components=())


def test_a_time_embedder_that_would_be_quantised_is_refused(path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.quantization\.skip .*condition_embedder"):
        models.load(config(path, quantization={"skip": ["ffn"]}), "cpu", components=())
    models.load(config(path, quantization={"skip": ["time_embedder"]}), "cpu", components=())


def test_a_plan_counts_the_tokens_of_all_frames(path: Path) -> None:
    model = models.load(config(path), "cpu", components={"transformer"})
    transformer, factor = models.family(model.config).settings(model.config)
    sizes = FAMILIES["wan"].SIZES
    assert sizes.latent_shape(model.config.shapes[0], transformer, factor) == model.latent_shape
    side = 16 // factor // 2
    assert sizes.image_tokens(model.config.shapes[0], factor) == model.image_tokens == 3 * side * side


def test_in_bfloat16_layers_that_diffusers_keeps_in_float32_stay_so_in_the_learner_too(path: Path) -> None:
    model = models.load(config(path, dtype="bfloat16"), "cpu", components={"text", "transformer"})
    stock = WanPipeline.from_pretrained(path, torch_dtype=torch.bfloat16).transformer
    ours, theirs = ({n: p.dtype for n, p in each.named_parameters()} for each in (model.transformer, stock))
    assert ours == theirs
    assert set(ours.values()) == {torch.float32, torch.bfloat16}
    (text,) = model.encode(["a red square"])
    embedding = {name: tensor[None].expand(2, -1, -1) for name, tensor in text.items()}
    latents = noise(model)
    with torch.no_grad():
        velocity = model.velocity(latents, 0.7, embedding)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # as the learner
            assert torch.equal(model.velocity(latents, 0.7, embedding), velocity)
        (expected,) = stock(
            latents.bfloat16(),
            timestep=torch.full((2,), 700.0),
            encoder_hidden_states=embedding["prompt_embeds"],
            return_dict=False,
        )
    torch.testing.assert_close(velocity, expected.float(), atol=1e-6, rtol=0)
    untouched = quantize_(model.transformer, "bf16", model.config.quantization)
    assert attestation.attest(model.transformer, "bf16", untouched)["arithmetic"] == "bfloat16"


def test_sizes_that_only_the_stock_pipeline_refuses_are_refused(tmp_path: Path) -> None:
    checkpoint = tiny_wan.build_sana_video(tmp_path / "pipeline")
    with pytest.raises(UserError) as refused:
        models.load(model_config("sana_video", checkpoint, resolution=[32, 48]), "cpu", components=())
    assert names(str(refused.value), "model.resolution", "48 32 64")


def test_a_checkpoint_that_follows_a_first_and_a_last_picture_is_refused(tmp_path: Path) -> None:
    checkpoint = tiny_wan.build_wan21_i2v(tmp_path / "pipeline")
    settings = checkpoint / "transformer" / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"pos_embed_seq_len": 514}))
    with pytest.raises(UserError) as refused:
        models.load(model_config("wan21_i2v", checkpoint), "cpu", components=())
    assert names(str(refused.value), "model.path", "first last wan21_i2v")


@pytest.mark.parametrize(
    ("build", "changes", "refused"),
    [
        (tiny_wan.build_wan, {"references": 1}, r"^model\.path is .*'WanPipeline'.*'wan21_i2v'"),
        (
            tiny_wan.build_wan21_i2v,
            {"max_sequence_length": 300},
            r"^model\.max_sequence_length is 300, .* needs exactly 512",
        ),
        (tiny_wan.build_wan21_i2v, {"frames": 8}, r"^model\.frames is 8"),
        (tiny_wan.build_wan21_i2v, {"references": 0}, r"^model\.references is 0, .* needs 1"),
    ],
)
def test_what_wan_21_cannot_do_from_a_picture_is_refused(
    build: Any, changes: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=refused):
        models.load(model_config("wan21_i2v", build(tmp_path / "pipeline"), **changes), "cpu", components=())
