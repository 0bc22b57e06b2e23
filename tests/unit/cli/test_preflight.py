"""What the files tell before a run: sizes that must be those of the loaded model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from solrl_ray import models
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.planning import model_facts
from solrl_ray.policy import adapters
from solrl_ray.quantization import nvfp4
from solrl_ray.quantization.planning import packed_bytes
from solrl_ray.quantization.scope import quantize_
from solrl_ray.records import Prompt
from tests.support import tiny


@pytest.fixture
def config(tmp_path: Path, tiny_pipeline: Path) -> Config:
    file = tmp_path / "config.yaml"
    file.write_text(f"""
model:
  family: flux
  path: {tiny_pipeline}
  dtype: float32
  resolution: {tiny.RESOLUTION}
  max_sequence_length: {tiny.T5_TOKENS}
  schedule: {{kind: flux}}
  lora: {{rank: 4, targets: [to_q, to_k, to_out.0, x_embedder]}}
  quantization: {{skip: [embedder, norm]}}
prompts: {{train: train.txt, heldout: heldout.txt}}
rewards: [{{kind: clipscore, path: clip}}]
""")
    return load([file])


def test_facts_from_the_checkpoints_configuration_are_those_of_the_loaded_model(config: Config) -> None:
    facts = model_facts.model_facts(config)
    model = models.load(config.model, "cpu", components=["transformer"])
    assert facts.latent_shape == model.latent_shape
    assert facts.parameters == sum(parameter.numel() for parameter in model.transformer.parameters())

    # Counted before the adapters are attached, as their layers wrap the linears.
    linears = {name for name, module in model.transformer.named_modules() if isinstance(module, nn.Linear)}
    adapters.attach(model.transformer, config.model.lora, config.run.seed)
    factors = adapters.factors(model.transformer, "default")
    adapted = {name.removesuffix(".lora_A") for name in factors if name.endswith(".lora_A")}
    assert facts.lora_modules == len(adapted)
    assert adapted < linears
    assert facts.lora_parameters == sum(factor.numel() for factor in factors.values())


def test_packed_bytes_are_those_of_the_linears_that_are_both_adapted_and_quantised(config: Config) -> None:
    transformer = models.load(config.model, "cpu", components=["transformer"]).transformer
    weights = {
        name: module.weight.detach()
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and name.endswith((".to_q", ".to_k", ".to_out.0"))
    }
    layers = quantize_(transformer, "nvfp4-emulated", config.model.quantization).layers
    packed = [nvfp4.quantize(nvfp4.pad_columns(weights[name])) for name in layers if name in weights]
    assert len(packed) == len(weights) == 5
    assert model_facts.model_facts(config).packed_bytes == sum(
        tensor.packed.numel() + tensor.scales.numel() for tensor in packed
    )


@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (128, 128), (7, 48), (5, 33)])
def test_a_packed_weight_has_the_size_of_the_quantisers(rows: int, columns: int) -> None:
    tensor = nvfp4.quantize(nvfp4.pad_columns(torch.ones(rows, columns)))
    assert packed_bytes("nvfp4", rows, columns) == tensor.packed.numel() + tensor.scales.numel()


def test_an_unquantised_tier_packs_nothing(config: Config, tmp_path: Path) -> None:
    facts = model_facts.model_facts(load([tmp_path / "config.yaml"], ["rollout.explore.precision=float32"]))
    assert facts.packed_bytes == 0


def test_of_many_prompts_the_longest_are_counted(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a", "a b c d e f g h i j " * 9, "a red ring " * 9, "a cat"]
    prompts = tuple(Prompt(id=str(number), text=text) for number, text in enumerate(texts))
    exact = [note.partition(" prompts ")[0] for note in model_facts.truncation(config, prompts)]
    assert set(exact) == {"2 of 4"}
    monkeypatch.setattr(model_facts, "TOKENIZED", 2)
    sampled = [note.partition(" prompts ")[0] for note in model_facts.truncation(config, prompts)]
    assert sampled == [f"at least (only the 2 longest were counted) {each}" for each in exact]
