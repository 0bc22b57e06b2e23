"""LoRA files in the format of diffusers, and their metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from solrl_ray.config.schema import Lora
from solrl_ray.errors import UserError
from solrl_ray.policy.reading import load_lora
from solrl_ray.policy.saving import FILE, save_lora
from solrl_ray.policy.tool_names import Network

LORA = Lora(rank=4, alpha=10.0, targets=["to_q", "to_k"])
"""Alpha differs from the rank, so that a lost alpha shows."""
ONE = Lora(rank=1, alpha=1.0, targets=["a"])
NETWORK = Network("FluxTransformer2DModel", {"a.to_q": 5, "a.to_k": 5, "a": 3, "b": 3}, None)


def random_factors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"A": (4, 6), "B": (5, 4)}
    names = [(f"a.{end}.lora_{each}", shapes[each]) for end in ("to_q", "to_k") for each in "AB"]
    return {name: torch.randn(shape, generator=generator) for name, shape in names}


def test_a_saved_lora_loads_back_bit_for_bit(tmp_path: Path) -> None:
    new = random_factors()
    lora = LORA.model_copy(update={"alpha": 8.0})  # twice the rank: exact
    file = save_lora(tmp_path, new, lora)
    assert file == tmp_path / FILE
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    for path in (file, tmp_path):
        loaded = load_lora(path, lora, NETWORK)
        assert list(loaded) == sorted(new)
        assert all(torch.equal(loaded[name], new[name]) for name in new)


def test_a_reader_that_knows_no_header_gets_the_trained_strength(tmp_path: Path) -> None:
    """ComfyUI multiplies B·A with alpha / rank if there is a key ``<module>.alpha``, else with 1."""
    new = random_factors()
    found = load_file(save_lora(tmp_path, new, LORA))
    assert {key.rpartition(".lora_")[2] for key in found} == {"A.weight", "B.weight"}
    for name in new:
        module = name.removesuffix(".lora_A")
        if module != name:
            read = found[f"transformer.{module}.lora_B.weight"] @ found[f"transformer.{module}.lora_A.weight"]
            torch.testing.assert_close(read, 10.0 / 4 * new[f"{module}.lora_B"] @ new[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("header", "strengths"),
    [
        ({"lora_alpha": 8}, (2.0, 2.0)),
        ({"lora_alpha": 8, "use_rslora": True, "lora_bias": False, "bias": "none"}, (4.0, 4.0)),
        ({"lora_alpha": 2, "alpha_pattern": {"to_k": 12}, "rank_pattern": {}}, (0.5, 3.0)),
        ({"lora_alpha": 2, "alpha_pattern": {"^a.to_q": 6, "to_q": 9}}, (1.5, 0.5)),
        ({"lora_alpha": 8, "r": 2, "rank_pattern": {"a.to_q": 4, "to_k": 4}}, (2.0, 2.0)),
    ],
)
def test_a_file_is_read_at_the_strength_at_which_peft_applies_it(
    header: dict[str, Any], strengths: tuple[float, float], tmp_path: Path
) -> None:
    network = nn.ModuleDict({"a": nn.ModuleDict({"to_q": nn.Linear(6, 5), "to_k": nn.Linear(6, 5)})})
    header = {"r": 4, "target_modules": ["to_q", "to_k"], **header}
    peft = LoraModel(network, LoraConfig(**header), "x")
    layers = {f"a.{end}": peft.model.a[end] for end in ("to_q", "to_k")}  # type: ignore[index]
    generator, tensors = torch.Generator().manual_seed(0), {}
    for (module, layer), strength in zip(layers.items(), strengths, strict=True):
        assert layer.scaling["x"] == strength
        for each, shape in (("A", (4, 6)), ("B", (5, 4))):
            tensors[f"transformer.{module}.lora_{each}.weight"] = torch.randn(shape, generator=generator)
    said = {"lora_adapter_metadata": json.dumps({f"transformer.{name}": value for name, value in header.items()})}
    save_file(tensors, tmp_path / FILE, said)
    loaded = load_lora(tmp_path, Lora(rank=4, alpha=6.0, targets=["to_q"]), NETWORK)
    for module, strength in zip(layers, strengths, strict=True):
        a, b = (tensors[f"transformer.{module}.lora_{each}.weight"] for each in "AB")
        torch.testing.assert_close(6 / 4 * loaded[f"{module}.lora_B"] @ loaded[f"{module}.lora_A"], strength * b @ a)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"use_dora": True}, "has use_dora True in its header"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights 'pissa'"),
        ({"fan_in_fan_out": True}, "has fan_in_fan_out True"),
        ({"modules_to_save": ["proj_out"]}, r"has modules_to_save \['proj_out'\]"),
        ({"a_field_of_later_versions": 3}, "has a_field_of_later_versions 3"),
        ({"alpha_pattern": {"(a+)+b": 3}}, r"has \(a\+\)\+b 'a pattern' in its header"),
        ({"r": 2}, "states rank 2 of a but holds rank 1"),
        ({"lora_alpha": float("nan")}, "does not state r and lora_alpha"),
        ({"alpha_pattern": {"a": "much"}}, "does not state r and lora_alpha"),
        ({"lora_alpha": 10**400}, "does not state r and lora_alpha"),
        ({"alpha_pattern": {"a": 10**400}}, "does not state r and lora_alpha"),
        ({"lora_alpha": "8"}, "does not state r and lora_alpha"),
        ({"lora_alpha": 10**10}, "has alpha 10000000000.0 of a"),
    ],
)
def test_metadata_that_a_run_cannot_keep_is_refused_by_name(more: dict[str, Any], problem: str, tmp_path: Path) -> None:
    said = {"r": 1, "lora_alpha": 2, "bias": "none", "peft_type": "LORA", "init_lora_weights": True} | more
    header = json.dumps({f"transformer.{name}": value for name, value in said.items()})
    tensors = {"transformer.a.lora_A.weight": torch.zeros(1, 2), "transformer.a.lora_B.weight": torch.zeros(3, 1)}
    save_file(tensors, tmp_path / FILE, {"lora_adapter_metadata": header})
    with pytest.raises(UserError, match=problem):
        load_lora(tmp_path, ONE, NETWORK)


def test_a_saved_lora_has_the_same_bytes_whatever_the_order_of_factors_and_targets(tmp_path: Path) -> None:
    factors = {"b.lora_A": torch.ones(1, 2), "a.lora_B": torch.zeros(3, 1)}
    contents = set()
    for attempt in range(4):
        factors = dict(reversed(factors.items()))
        lora = Lora(rank=1, alpha=3.0, targets=["to_q", "to_k"][:: -1 if attempt % 2 else 1])
        contents.add(save_lora(tmp_path / str(attempt), factors, lora).read_bytes())
    assert len(contents) == 1


def test_what_is_no_lora_of_the_transformer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.safetensors"):
        load_lora(tmp_path / "missing.safetensors", ONE, NETWORK)
    torch.save({"transformer.a.lora_A.weight": torch.zeros(1, 2)}, tmp_path / "pickled.safetensors")
    with pytest.raises(UserError, match=r"pickled\.safetensors cannot be read as safetensors"):
        load_lora(tmp_path / "pickled.safetensors", ONE, NETWORK)
    for content, what in (
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "is a Git LFS pointer"),
        ("<!doctype html>\n<html><head><title>401</title></head></html>", "is an HTML page"),
    ):
        (tmp_path / "downloaded.safetensors").write_text(content)
        with pytest.raises(UserError, match=rf"downloaded\.safetensors {what}"):
            load_lora(tmp_path / "downloaded.safetensors", ONE, NETWORK)
    header = {"lora_adapter_metadata": json.dumps({"transformer.r": 1, "transformer.lora_alpha": 2.0})}
    save_file({"text_encoder.a.lora_A.weight": torch.zeros(1, 2)}, tmp_path / FILE, metadata=header)
    with pytest.raises(UserError, match=r"text_encoder\.a\.lora_A\.weight"):
        load_lora(tmp_path, ONE, NETWORK)


@pytest.mark.parametrize("said", ["{}", "[]", "{", "[" * 100_000, '{"transformer.r": 4}'])
def test_a_lora_file_that_says_too_little_of_itself_is_refused(said: str, tmp_path: Path) -> None:
    save_file({"transformer.a.lora_A.weight": torch.zeros(1, 2)}, tmp_path / FILE, {"lora_adapter_metadata": said})
    with pytest.raises(UserError, match=r"does not state r and lora_alpha of a transformer's adapter"):
        load_lora(tmp_path, ONE, NETWORK)


def test_a_folder_of_peft_is_read_at_its_alpha(tmp_path: Path) -> None:
    network = nn.ModuleDict({"a": nn.ModuleDict({"to_q": nn.Linear(6, 5), "to_k": nn.Linear(6, 5)})})
    adapter = LoraConfig(r=4, lora_alpha=6, target_modules=["to_q", "to_k"], init_lora_weights="gaussian")
    model = get_peft_model(network, adapter)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    loaded = load_lora(tmp_path, LORA, NETWORK)
    for end in ("to_q", "to_k"):
        changed = 10.0 / 4 * loaded[f"a.{end}.lora_B"] @ loaded[f"a.{end}.lora_A"]
        torch.testing.assert_close(changed, model.base_model.model.a[end].get_delta_weight("default").detach())
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        load_lora(tmp_path, LORA, NETWORK)
