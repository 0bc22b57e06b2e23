"""What all families have in common, by the FLUX adapter: paths, refusals, batches of embeddings, and its packing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from safetensors.torch import load_file, save_file

from solrl_ray import models
from solrl_ray.errors import UserError
from solrl_ray.models import flux, paths
from solrl_ray.records import PromptEmbedding
from tests.support import tiny
from tests.support.tensors import randn as noise

TEXTS = ["a red square", "two blue circles"]


def embedding(text: str, tensors: dict[str, torch.Tensor]) -> PromptEmbedding:
    return PromptEmbedding(prompt_id=text, tensors=tensors, digest=text)


def test_weights_are_pages_of_the_checkpoints_files_which_processes_of_a_node_share(tiny_pipeline: Path) -> None:
    model = models.load(tiny.model_config(tiny_pipeline), "cpu", components={"transformer", "vae"})
    for part, module in (("transformer", model.transformer), ("vae", model.decoder)):
        fields = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        ends = [entry[0].split("-") for entry in fields if entry[-1].startswith(f"{tiny_pipeline}/{part}/")]
        pages = [range(int(first, 16), int(last, 16)) for first, last in ends]
        assert all(any(w.data_ptr() in p for p in pages) for w in module.parameters()), part


def test_latent_shape_is_known_without_the_vae(tiny_pipeline: Path) -> None:
    model = models.load(tiny.model_config(tiny_pipeline), "cpu", components={"transformer"})
    assert model.latent_shape == (16, 16)
    assert model.image_tokens == 16
    assert model.components == {"transformer"}
    with pytest.raises(ValueError, match=r"'vae'.*was not loaded, only transformer"):
        model.decode(noise(1, 16, 16))


def test_sizes_are_known_without_any_weights(tiny_pipeline: Path) -> None:
    model = models.load(tiny.model_config(tiny_pipeline, resolution=32), "cpu", components=())
    assert (model.latent_shape, model.image_tokens) == ((64, 16), 64)
    with pytest.raises(ValueError, match=r"unknown components \['unet'\]"):
        models.load(tiny.model_config(tiny_pipeline), "cpu", components={"unet"})


def test_modules_are_frozen_and_in_eval_mode_with_the_configured_dtype(tiny_pipeline: Path) -> None:
    model = models.load(tiny.model_config(tiny_pipeline, dtype="bfloat16"), "cpu")
    modules = [model._module(name) for name in model.components]
    assert not any(module.training for top in modules for module in top.modules())
    assert not any(parameter.requires_grad for module in modules for parameter in module.parameters())
    assert {parameter.dtype for module in modules for parameter in module.parameters()} == {torch.bfloat16}


def test_velocity_refuses_latents_of_another_resolution(tiny_pipeline: Path) -> None:
    model = models.load(tiny.model_config(tiny_pipeline), "cpu", components={"transformer"})
    with pytest.raises(ValueError, match=r"latents are \(1, 64, 16\)"):
        model.velocity(noise(1, 64, 16), 0.5, {})


def test_a_batch_of_one_prompt_is_one_copy_and_others_keep_their_order(tiny_pipeline: Path) -> None:
    model = models.load(tiny.model_config(tiny_pipeline), "cpu", components={"text"})
    first, second = (embedding(t, e) for t, e in zip(TEXTS, model.encode(TEXTS), strict=True))
    repeated = model.batch_embeddings([first] * 3)["prompt_embeds"]
    assert repeated.shape == (3, tiny.T5_TOKENS, 32)
    assert repeated.stride(0) == 0
    mixed = model.batch_embeddings([second, first])["pooled_prompt_embeds"]
    assert torch.equal(mixed[0], second.tensors["pooled_prompt_embeds"])
    assert torch.equal(mixed[1], first.tensors["pooled_prompt_embeds"])


def test_text_identity_changes_with_weights_and_sequence_length(tiny_pipeline: Path, tmp_path: Path) -> None:
    other = tiny.build_pipeline(tmp_path / "other", seed=5)
    shorter = tiny.model_config(tiny_pipeline, max_sequence_length=8)
    identities = [
        models.load(config, "cpu", components={"text"}).text_identity()
        for config in (tiny.model_config(tiny_pipeline), tiny.model_config(other), shorter)
    ]
    assert identities[0]["text_encoder_2"] != identities[1]["text_encoder_2"]
    assert identities[0]["tokenizer"] == identities[1]["tokenizer"]
    assert identities[0] != identities[2]
    again = models.load(tiny.model_config(tiny_pipeline), "cpu", components={"text"}).text_identity()
    assert identities[0] == again


def test_a_token_is_a_2x2_patch_as_the_stock_pipeline_packs_them() -> None:
    latent = torch.arange(48.0).reshape(1, 2, 4, 6)
    tokens = FluxPipeline._pack_latents(latent, 1, 2, 4, 6)
    # Token 1 is the upper middle patch: channel 0 then channel 1, each row by row.
    assert tokens[0, 1].tolist() == [2, 3, 8, 9, 26, 27, 32, 33]
    assert torch.equal(flux.unpack(tokens, 2, 3), latent)


def test_unpacked_latents_are_laid_out_with_columns_last_whatever_the_batch() -> None:
    """With channels last a convolution rounds otherwise, and every reward and digest is another one."""
    for batch in (1, 2, 24):
        unpacked = flux.unpack(torch.randn(batch, 64, 64), 8, 8)
        assert unpacked.stride() == (16 * 16 * 16, 16 * 16, 16, 1)


def test_a_name_with_one_slash_is_a_hub_id_unless_the_folder_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert paths.resolve("owner/name") == "owner/name"
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert paths.resolve("owner/name") == Path("owner/name")
    assert paths.resolve("/a/b/c") == Path("/a/b/c")


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "a/b/c", "builtin:testbed/none"])
def test_a_missing_folder_is_a_user_error_naming_the_key(path: str) -> None:
    with pytest.raises(UserError, match=r"^model\.path is '.*', but there is no folder .*Hugging Face id"):
        models.load(tiny.model_config(path), "cpu")


def test_a_hub_id_that_cannot_be_had_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^model\.path is 'nobody/nothing', which is not a local folder"):
        models.load(tiny.model_config("nobody/nothing"), "cpu")


def copy_with(source: Path, target: Path, file: str, changes: dict[str, object]) -> Path:
    shutil.copytree(source, target)
    content = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps(content | changes))
    return target


def test_an_unknown_vae_class_is_refused(tiny_pipeline: Path, tmp_path: Path) -> None:
    changes: dict[str, object] = {"vae": ["diffusers", "AutoencoderDC"]}
    path = copy_with(tiny_pipeline, tmp_path / "dc", "model_index.json", changes)
    with pytest.raises(UserError, match=r"model\.path .*'AutoencoderDC'; supported are AutoencoderKL"):
        models.load(tiny.model_config(path), "cpu")


@pytest.mark.parametrize("part", ["transformer", "text_encoder_2", "vae", "tokenizer", "tokenizer_2"])
def test_missing_files_are_a_user_error_naming_the_part(tiny_pipeline: Path, tmp_path: Path, part: str) -> None:
    path = tmp_path / "broken"
    shutil.copytree(tiny_pipeline, path)
    for file in (path / part).glob("*" if part.startswith("tokenizer") else "*.safetensors"):
        file.unlink()
    with pytest.raises(UserError, match=rf"model\.path is .*broken', but {part} cannot be read"):
        models.load(tiny.model_config(path), "cpu")


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_weights_that_lack_a_tensor_are_refused_instead_of_filled_at_random(
    tiny_pipeline: Path, tmp_path: Path, part: str
) -> None:
    path = tmp_path / "holed"
    shutil.copytree(tiny_pipeline, path)
    (file,) = (path / part).glob("*.safetensors")
    tensors = load_file(file)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"model\.path is .*holed', but {part} .*{re.escape(name)}"):
        models.load(tiny.model_config(path), "cpu")


def test_sizes_that_do_not_fit_the_checkpoint_are_user_errors(tiny_pipeline: Path) -> None:
    with pytest.raises(UserError, match=r"model\.resolution is 18, .*multiple of 4"):
        models.load(tiny.model_config(tiny_pipeline, resolution=18), "cpu")
    with pytest.raises(UserError, match=r"model\.max_sequence_length is 600, .*at most 512"):
        models.load(tiny.model_config(tiny_pipeline, max_sequence_length=600), "cpu")
