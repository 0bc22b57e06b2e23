"""LoRA adapters, their decay and average, merging and digests."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

from solrl_ray import models
from solrl_ray.config.schema import Lora
from solrl_ray.errors import UserError
from solrl_ray.models.base import DiffusionModel
from solrl_ray.policy import adapters
from solrl_ray.policy.digest import lora_digest
from solrl_ray.policy.merge import merged_weight, round_once
from solrl_ray.records import Address
from solrl_ray.sampling.noise import standard_normal
from tests.support import tiny

LORA = Lora(rank=4, alpha=10.0, targets=tiny.TARGETS)
"""Alpha differs from the rank, so that a lost alpha shows."""
MODULES = [
    "single_transformer_blocks.0.attn.to_k",
    "single_transformer_blocks.0.attn.to_q",
    "single_transformer_blocks.0.attn.to_v",
    "transformer_blocks.0.attn.to_k",
    "transformer_blocks.0.attn.to_out.0",
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.0.attn.to_v",
]


@pytest.fixture
def model(tiny_pipeline: Path) -> DiffusionModel:
    loaded = models.load(tiny.model_config(tiny_pipeline, lora=LORA), "cpu", components={"transformer"})
    adapters.attach(loaded.transformer, LORA, run_seed=42)
    return loaded


@pytest.fixture
def transformer(model: DiffusionModel) -> nn.Module:
    return model.transformer


def random_factors(like: Mapping[str, Tensor], seed: int, scale: float = 0.2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(value.shape, generator=generator) for name, value in like.items()}


def velocity(model: DiffusionModel) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(2, *model.latent_shape, generator=generator)
    embedding = {
        "prompt_embeds": torch.randn(1, 12, 32, generator=generator).to(model.dtype),
        "pooled_prompt_embeds": torch.randn(1, 32, generator=generator).to(model.dtype),
    }
    return model.velocity(latents, 0.5, embedding)


def trainable(transformer: nn.Module) -> set[str]:
    return {name for name, parameter in transformer.named_parameters() if parameter.requires_grad}


# --- adapters


def test_both_adapters_start_equal_with_addressed_gaussian_a_and_zero_b(transformer: nn.Module) -> None:
    default, old = adapters.factors(transformer, "default"), adapters.factors(transformer, "old")
    assert list(default) == [f"{module}.{factor}" for module in MODULES for factor in ("lora_A", "lora_B")]
    for name in default:
        assert torch.equal(default[name], old[name])
    address = Address(run_seed=42, purpose="lora-init", prompt_id=MODULES[4])
    expected = torch.from_numpy(standard_normal(address, (4, 32))) * 0.25
    assert torch.equal(default[f"{MODULES[4]}.lora_A"], expected)
    assert default[f"{MODULES[4]}.lora_B"].shape == (32, 4)
    assert not any(value.any() for name, value in default.items() if name.endswith("lora_B"))


def test_the_start_does_not_draw_from_the_global_generator(tiny_pipeline: Path) -> None:
    transformer = FluxTransformer2DModel.from_pretrained(tiny_pipeline, subfolder="transformer")
    before = torch.random.get_rng_state()
    adapters.attach(transformer, LORA, run_seed=42)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_each_name_forwards_its_own_factors(model: DiffusionModel) -> None:
    transformer = model.transformer
    adapters.load_factors(transformer, "old", random_factors(adapters.factors(transformer, "old"), seed=1))
    adapters.load_factors(transformer, "default", random_factors(adapters.factors(transformer, "old"), seed=2))
    outputs = {}
    with torch.no_grad():
        for name in ("default", "old", "base"):
            adapters.use(transformer, name)  # type: ignore[arg-type]
            assert adapters.active_adapter(transformer) == name
            outputs[name] = velocity(model)
        adapters.use(transformer, "default")
        assert torch.equal(velocity(model), outputs["default"])
    assert not torch.allclose(outputs["default"], outputs["old"], atol=1e-4)
    assert not torch.allclose(outputs["old"], outputs["base"], atol=1e-4)


@pytest.mark.parametrize("name", ["default", "old", "base"])
def test_only_default_factors_are_ever_trainable(transformer: nn.Module, name: adapters.Active) -> None:
    adapters.use(transformer, name)
    expected = {f"{module}.{factor}.default.weight" for module in MODULES for factor in ("lora_A", "lora_B")}
    assert trainable(transformer) == expected


def test_gradients_reach_default_alone_and_hooks_survive_switching(model: DiffusionModel) -> None:
    transformer = model.transformer
    calls = []
    parameter = adapters.parameters(transformer, "default")[f"{MODULES[0]}.lora_B"]
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    with torch.no_grad(), adapters.using(transformer, "old"):
        velocity(model)
    velocity(model).square().sum().backward()
    assert len(calls) == 1
    assert all(p.grad is not None for p in adapters.parameters(transformer, "default").values())
    assert all(p.grad is None for p in adapters.parameters(transformer, "old").values())


def test_using_restores_what_was_active_even_after_an_error(transformer: nn.Module) -> None:
    adapters.use(transformer, "old")
    with adapters.using(transformer, "base"):
        assert adapters.active_adapter(transformer) == "base"
    assert adapters.active_adapter(transformer) == "old"
    with pytest.raises(RuntimeError), adapters.using(transformer, "base"):
        raise RuntimeError
    assert adapters.active_adapter(transformer) == "old"


def test_factors_are_float32_on_a_bfloat16_base(tiny_pipeline: Path) -> None:
    config = tiny.model_config(tiny_pipeline, dtype="bfloat16", lora=LORA)
    model = models.load(config, "cpu", components={"transformer"})
    adapters.attach(model.transformer, LORA, run_seed=42)
    values = adapters.parameters(model.transformer, "default")
    assert {value.dtype for value in values.values()} == {torch.float32}
    velocity(model).sum().backward()
    assert {value.grad.dtype for value in values.values() if value.grad is not None} == {torch.float32}


def test_factors_are_copies_and_loading_keeps_the_storage(transformer: nn.Module) -> None:
    live = adapters.parameters(transformer, "default")
    addresses = {name: value.data_ptr() for name, value in live.items()}
    copies = adapters.factors(transformer, "default")
    new = random_factors(copies, seed=5)
    adapters.load_factors(transformer, "default", new)
    assert not torch.equal(copies[f"{MODULES[0]}.lora_B"], new[f"{MODULES[0]}.lora_B"])
    for name, value in adapters.parameters(transformer, "default").items():
        assert value.data_ptr() == addresses[name]
        assert torch.equal(value, new[name])


def test_a_target_that_matches_nothing_is_a_user_error(tiny_pipeline: Path) -> None:
    transformer = FluxTransformer2DModel.from_pretrained(tiny_pipeline, subfolder="transformer")
    misspelt = Lora(rank=4, alpha=8.0, targets=["to_q", "to_query"])
    with pytest.raises(UserError, match=r"^model\.lora\.targets has 'to_query', .* no linear layer"):
        adapters.attach(transformer, misspelt, run_seed=1)
    with pytest.raises(UserError, match=r"^model\.lora\.targets is empty"):
        adapters.attach(transformer, Lora(rank=4, alpha=8.0, targets=[]), run_seed=1)
    # "q" ends the name but is no part of the path: PEFT would not match it either.
    with pytest.raises(UserError, match=r"'q'"):
        adapters.attach(transformer, Lora(rank=4, alpha=8.0, targets=["q"]), run_seed=1)


# --- decay and average


def set_all(transformer: nn.Module, adapter: adapters.Adapter, value: float) -> None:
    like = adapters.factors(transformer, adapter)
    adapters.load_factors(transformer, adapter, {n: torch.full_like(v, value) for n, v in like.items()})


def test_decay_moves_old_towards_default(transformer: nn.Module) -> None:
    set_all(transformer, "old", 1.0)
    set_all(transformer, "default", 3.0)
    adapters.decay_(transformer, 0.25)
    for value in adapters.factors(transformer, "old").values():
        assert torch.equal(value, torch.full_like(value, 2.5))
    for value in adapters.factors(transformer, "default").values():
        assert torch.equal(value, torch.full_like(value, 3.0))
    adapters.decay_(transformer, 1.0)
    assert all(bool((value == 2.5).all()) for value in adapters.factors(transformer, "old").values())
    adapters.decay_(transformer, 0.0)
    assert all(bool((value == 3.0).all()) for value in adapters.factors(transformer, "old").values())


def test_ema_moves_by_one_minus_decay_and_is_held_apart(transformer: nn.Module) -> None:
    set_all(transformer, "default", 1.0)
    ema = adapters.Ema(adapters.factors(transformer, "default"))
    set_all(transformer, "default", 5.0)
    ema.update(adapters.parameters(transformer, "default"), decay=0.75)
    assert all(torch.equal(v, torch.full_like(v, 2.0)) for v in ema.factors.values())
    ema.update(adapters.parameters(transformer, "default"), decay=0.75)
    assert all(torch.equal(v, torch.full_like(v, 2.75)) for v in ema.factors.values())
    assert all(torch.equal(v, torch.full_like(v, 5.0)) for v in adapters.factors(transformer, "default").values())


# --- merging


def nearest_bfloat16(value: Fraction) -> float:
    """Round to 8 significant bits, ties to even, in rational arithmetic; normal range only."""
    if value == 0:
        return 0.0
    magnitude, exponent = abs(value), 0
    while magnitude >= 256:
        magnitude, exponent = magnitude / 2, exponent + 1
    while magnitude < 128:
        magnitude, exponent = magnitude * 2, exponent - 1
    mantissa = round(magnitude)  # ties to even
    return float(mantissa * Fraction(2) ** exponent) * (1 if value > 0 else -1)


def test_merging_rounds_the_exact_sum_once_to_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 5, generator=generator).bfloat16()
    a, b = torch.randn(3, 5, generator=generator), torch.randn(6, 3, generator=generator)
    merged = merged_weight(base, a, b, scaling=2.0)
    assert merged.dtype == torch.bfloat16
    for i in range(6):
        for j in range(5):
            delta = sum(Fraction(b[i, r].item()) * Fraction(a[r, j].item()) for r in range(3))
            assert merged[i, j].item() == nearest_bfloat16(Fraction(base[i, j].item()) + 2 * delta)


def test_rounding_to_bfloat16_is_not_done_twice() -> None:
    # Just above the midpoint of 1 and 1 + 2^-7: rounding to float32 first loses the 2^-40 and then ties to 1.
    above = 1 + 2.0**-8 + 2.0**-40
    values = torch.tensor([above, -above, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 0.0, 2.0**-130], dtype=torch.float64)
    rounded = round_once(values, torch.bfloat16)
    assert rounded.tolist() == [1 + 2.0**-7, -(1 + 2.0**-7), 1.0, 1 + 2.0**-6, 0.0, 2.0**-130]
    # Just below the midpoint: stays below, from either sign.
    below = 1 + 3 * 2.0**-8 - 2.0**-40
    assert round_once(torch.tensor([below, -below], dtype=torch.float64), torch.bfloat16).tolist() == [
        1 + 2.0**-7,
        -(1 + 2.0**-7),
    ]


def test_a_merged_transformer_computes_what_the_adapter_does(model: DiffusionModel, tiny_pipeline: Path) -> None:
    transformer = model.transformer
    new = random_factors(adapters.factors(transformer, "default"), seed=4)
    adapters.load_factors(transformer, "default", new)
    plain = models.load(model.config, "cpu", components={"transformer"})
    with torch.no_grad():
        base = velocity(plain)
        for module in MODULES:
            linear = plain.transformer.get_submodule(module)
            a, b = new[f"{module}.lora_A"], new[f"{module}.lora_B"]
            linear.weight.copy_(merged_weight(linear.weight, a, b, scaling=10.0 / 4))  # type: ignore
        merged, adapted = velocity(plain), velocity(model)
    assert (adapted - base).abs().max() > 0.01
    torch.testing.assert_close(merged, adapted, atol=2e-5, rtol=0)


# --- digest


def test_the_digest_is_sha256_over_sorted_names_shapes_and_little_endian_bytes() -> None:
    factors = {"b.lora_A": torch.tensor([[1.0, -2.5]]), "a.lora_B": torch.tensor([[0.5]])}
    expected = hashlib.sha256(
        b"a.lora_B 1,1\n" + struct.pack("<f", 0.5) + b"b.lora_A 1,2\n" + struct.pack("<2f", 1.0, -2.5)
    ).hexdigest()
    assert lora_digest(factors) == expected
    assert lora_digest(dict(reversed(factors.items()))) == expected
    assert lora_digest(factors | {"a.lora_B": torch.tensor([[np.nextafter(np.float32(0.5), 1)]])}) != expected


def test_the_digest_refuses_what_is_not_float32() -> None:
    with pytest.raises(ValueError, match=r"factor a is torch\.bfloat16"):
        lora_digest({"a": torch.zeros(1).bfloat16()})
    with pytest.raises(ValueError, match="no factors"):
        lora_digest({})


def test_factors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4, 5\), \(6, 3\) do not fit weight \(6, 5\)"):
        merged_weight(torch.zeros(6, 5), torch.zeros(4, 5), torch.zeros(6, 3), 1.0)
    with pytest.raises(ValueError, match="bfloat16"):
        merged_weight(torch.zeros(6, 5), torch.zeros(3, 5).bfloat16(), torch.zeros(6, 3), 1.0)
