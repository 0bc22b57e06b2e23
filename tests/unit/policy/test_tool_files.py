"""Files for ComfyUI and kohya's scripts, read back by diffusers' converters, and files of other trainers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from safetensors.torch import save_file
from torch import Tensor, nn

from solrl_ray.config.schema import Lora
from solrl_ray.errors import UserError
from solrl_ray.models import FAMILIES
from solrl_ray.policy.reading import load_lora
from solrl_ray.policy.saving import tool_tensors
from solrl_ray.policy.tool_names import Network, Tool

RANK, ALPHA = 2, 4.0
HEADS: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 2}


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    pipeline: Any
    known: str
    """The linears of which both tools know LoRA, as a pattern of their paths."""


MODELS = {
    # As wide as FLUX.1: diffusers' converter knows no other width of its single blocks.
    "flux": Model(
        lambda: FluxTransformer2DModel(num_layers=1, num_single_layers=1, joint_attention_dim=32),
        FluxPipeline,
        r".*_blocks\..*",
    ),
    "flux2_klein": Model(
        lambda: Flux2Transformer2DModel(num_layers=2, num_single_layers=11, joint_attention_dim=48, **HEADS),
        Flux2KleinPipeline,
        r".*_blocks\..*",
    ),
    "qwen_image": Model(
        lambda: QwenImageTransformer2DModel(in_channels=16, num_layers=11, joint_attention_dim=32, **HEADS),
        QwenImagePipeline,
        r"transformer_blocks\..*",
    ),
    "sd3": Model(
        lambda: SD3Transformer2DModel(num_layers=3, dual_attention_layers=(0,), caption_projection_dim=32, **HEADS),
        StableDiffusion3Pipeline,
        r"transformer_blocks\..*(?<!norm1_context\.linear)",
    ),
    "wan": Model(
        lambda: WanTransformer3DModel(num_layers=2, text_dim=24, freq_dim=16, ffn_dim=48, **HEADS),
        WanPipeline,
        r"blocks\..*",
    ),
    "wan21_i2v": Model(
        lambda: WanTransformer3DModel(
            num_layers=2, text_dim=24, freq_dim=16, ffn_dim=48, image_dim=16, added_kv_proj_dim=32, **HEADS
        ),
        WanImageToVideoPipeline,
        r"blocks\..*",
    ),
    "z_image": Model(
        lambda: ZImageTransformer2DModel(
            dim=48, n_layers=11, n_heads=2, n_kv_heads=2, cap_feat_dim=24, axes_dims=[8, 8, 8]
        ),
        ZImagePipeline,
        r".*\.(attention|feed_forward)\..*",
    ),
}


@dataclass(frozen=True)
class Trained:
    """A LoRA on every linear that the tools know."""

    network: Network
    lora: Lora
    factors: dict[str, Tensor]

    def added(self) -> dict[str, Tensor]:
        """Linear → what the LoRA adds to its outputs."""
        names = [name.removesuffix(".lora_A") for name in self.factors if name.endswith(".lora_A")]
        return {
            name: ALPHA / RANK * outputs(self.factors[f"{name}.lora_A"], self.factors[f"{name}.lora_B"])
            for name in names
        }

    def read(self, tensors: dict[str, Tensor], folder: Path, **metadata: str) -> dict[str, Tensor]:
        save_file(tensors, folder / "lora.safetensors", metadata)
        return load_lora(folder / "lora.safetensors", self.lora, self.network)


def outputs(a: Tensor, b: Tensor) -> Tensor:
    """B A x for some random x: as telling as B A, and small where that is 21,504 × 3,072."""
    x = torch.randn(a.shape[1], 8, generator=torch.Generator().manual_seed(7))
    return b.float() @ (a.float() @ x)


def trained(name: str, pattern: str = "") -> Trained:
    with torch.device("meta"):
        transformer = MODELS[name].make()
    linears = {path: module for path, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    rows = {path: linear.out_features for path, linear in linears.items()}
    network = Network(type(transformer).__name__, rows, FAMILIES[name].TOOL_NAMES)
    generator, factors = torch.Generator().manual_seed(1), dict[str, Tensor]()
    for path, linear in linears.items():
        if re.fullmatch(pattern or MODELS[name].known, path):
            factors[f"{path}.lora_A"] = torch.randn(RANK, linear.in_features, generator=generator)
            factors[f"{path}.lora_B"] = torch.randn(linear.out_features, RANK, generator=generator)
    targets = sorted({key.rpartition(".")[0] for key in factors})
    return Trained(network, Lora(rank=RANK, alpha=ALPHA, targets=targets), factors)


def by_diffusers(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Linear → what the stock pipeline adds to its outputs, if it is not zero."""
    found = MODELS[name].pipeline.lora_state_dict(dict(tensors))
    assert {key.partition(".")[0] for key in found} == {"transformer"}
    ends = (".lora_A.weight", ".lora_B.weight")
    names = {key.removeprefix("transformer.").removesuffix(ends[0]).removesuffix(ends[1]) for key in found}
    added = {each: outputs(*(found[f"transformer.{each}{end}"] for end in ends)) for each in names}
    return {each: output for each, output in added.items() if output.any()}


def by_published_sd3(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of a kohya file for SD3, whose LoRA diffusers does not read: its published weights it does."""

    class Weights(dict[str, Tensor]):
        def pop(self, key: str, *_: Any) -> Tensor:
            return super().pop(key, torch.zeros(6, 2))

    weights = Weights({"context_embedder.weight": torch.zeros(6, 2)})
    block = r"lora_unet_joint_blocks_(\d+)_(x|context)_block_(attn2?|mlp|adaLN_modulation)_(\w+)"
    for key in tensors:
        if key.endswith(".alpha"):
            name = key.removesuffix(".alpha")
            down, up = (tensors[f"{name}.lora_{end}.weight"] for end in ("down", "up"))
            path = re.sub(block, r"joint_blocks.\1.\2_block.\3.\4.weight", name)
            weights[path] = tensors[key] / len(down) * up @ down
    read = convert_sd3_transformer_checkpoint_to_diffusers(weights)
    return {
        key.removesuffix(".weight"): outputs(delta, torch.eye(len(delta))) for key, delta in read.items() if delta.any()
    }


@pytest.mark.parametrize("tool", ["comfyui", "kohya"])
@pytest.mark.parametrize("name", MODELS)
def test_diffusers_reads_what_was_trained_and_so_do_we(name: str, tool: Tool, tmp_path: Path) -> None:
    given = trained(name)
    tensors = tool_tensors(tool, given.factors, given.lora, given.network)
    found = by_published_sd3(tensors) if (name, tool) == ("sd3", "kohya") else by_diffusers(name, tensors)
    expected = given.added()
    assert found.keys() == expected.keys()
    for linear, added in expected.items():
        torch.testing.assert_close(found[linear], added, rtol=1e-4, atol=1e-2)
    read = given.read(tensors, tmp_path)
    assert read.keys() == given.factors.keys()
    assert all(torch.equal(read[key], given.factors[key]) for key in read)


@pytest.mark.parametrize(
    ("name", "tool", "keys"),
    [
        ("flux", "comfyui", {"transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight": (2, 3072)}),
        (
            "flux",
            "kohya",
            {
                "lora_unet_single_blocks_0_linear1.alpha": (),
                "lora_unet_single_blocks_0_linear1.lora_down.weight": (8, 3072),
                "lora_unet_single_blocks_0_linear1.lora_up.weight": (21504, 8),
                "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": (6, 3072),
                "lora_unet_double_blocks_0_txt_mlp_2.lora_up.weight": (3072, 2),
            },
        ),
        ("flux2_klein", "comfyui", {"diffusion_model.single_blocks.10.linear1.lora_B.weight": (288, 2)}),
        ("qwen_image", "comfyui", {"diffusion_model.transformer_blocks.10.attn.to_out.0.lora_B.weight": (32, 2)}),
        ("qwen_image", "kohya", {"lora_unet_transformer_blocks_10_attn_to_out_0.lora_up.weight": (32, 2)}),
        ("sd3", "kohya", {"lora_unet_joint_blocks_2_context_block_attn_qkv.lora_down.weight": (6, 32)}),
        ("z_image", "comfyui", {"diffusion_model.layers.10.attention.to_q.lora_A.weight": (2, 48)}),
        ("z_image", "kohya", {"lora_unet_noise_refiner_0_attention_to_out_0.lora_down.weight": (2, 48)}),
    ],
)
def test_keys_and_shapes_are_those_of_the_tool(name: str, tool: Tool, keys: dict[str, tuple[int, ...]]) -> None:
    given = trained(name)
    tensors = tool_tensors(tool, given.factors, given.lora, given.network)
    assert {key: tuple(tensors[key].shape) for key in keys} == keys
    assert any(key.endswith(".alpha") for key in tensors) == (tool == "kohya")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_a_linear_of_which_a_part_is_not_trained_has_the_rank_of_the_others(tmp_path: Path) -> None:
    given = trained("flux", r".*\.to_[qkv]")
    tensors = tool_tensors("kohya", given.factors, given.lora, given.network)
    down, up, alpha = (
        tensors[f"lora_unet_single_blocks_0_linear1.{end}"] for end in ("lora_down.weight", "lora_up.weight", "alpha")
    )
    assert (len(down), up.shape[1], alpha.item()) == (6, 6, 12.0)
    assert not up[3 * 3072 :].any()
    found, expected = by_diffusers("flux", tensors), given.added()
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[linear], added, rtol=1e-4, atol=1e-2) for linear, added in expected.items())
    read = given.read(tensors, tmp_path)
    assert read.keys() == given.factors.keys()
    assert all(torch.equal(read[key], given.factors[key]) for key in read)


@pytest.mark.parametrize("tool", ["comfyui", "kohya"])
def test_what_a_tool_does_not_know_is_refused_by_name(tool: Tool) -> None:
    given = trained("flux", r".*\.to_q|x_embedder")
    with pytest.raises(UserError, match=rf"^--format is {tool}, .*x_embedder"):
        tool_tensors(tool, given.factors, given.lora, given.network)
    sana = Network(SanaTransformer2DModel.__name__, given.network.rows, FAMILIES["sana"].TOOL_NAMES)
    with pytest.raises(UserError, match=rf"^--format is {tool}, .*SanaTransformer2DModel"):
        tool_tensors(tool, given.factors, given.lora, sana)


# Other trainers


A = torch.randn(RANK, 32, generator=torch.Generator().manual_seed(2))
B = torch.randn(96, RANK, generator=torch.Generator().manual_seed(3))
QKV = tuple(f"transformer_blocks.0.attn.{end}" for end in ("to_q", "to_k", "to_v"))
OUT = "transformer_blocks.1.attn.to_out.0"


@pytest.mark.parametrize(
    ("keys", "up", "alpha", "changed"),
    [
        pytest.param("transformer.{OUT}.lora_{AB}.weight", B[:32], None, {OUT: B[:32]}, id="ai-toolkit"),
        pytest.param("transformer.{OUT}.lora_{AB}.weight", B[:32], 1.0, {OUT: 0.5 * B[:32]}, id="SimpleTuner"),
        pytest.param(
            "diffusion_model.double_blocks.1.img_attn.proj.lora_{AB}.weight",
            B[:32],
            None,
            {OUT: B[:32]},
            id="ai-toolkit, published names",
        ),
        pytest.param(
            "diffusion_model.double_blocks.0.img_attn.qkv.lora_{AB}.weight",
            B,
            4.0,
            {linear: 2.0 * part for linear, part in zip(QKV, B.split(32), strict=True)},
            id="SimpleTuner, published names",
        ),
        pytest.param(
            "lora_unet_double_blocks_0_img_attn_qkv.lora_{down}.weight",
            B,
            1.0,
            {linear: 0.5 * part for linear, part in zip(QKV, B.split(32), strict=True)},
            id="kohya, one LoRA for three",
        ),
        pytest.param(
            "lora_unet_double_blocks_1_img_attn_proj.lora_{down}.weight", B[:32], None, {OUT: B[:32]}, id="old"
        ),
        pytest.param(
            "lora_transformer_transformer_blocks_1_attn_to_out_0.lora_{down}.weight",
            B[:32],
            1.0,
            {OUT: 0.5 * B[:32]},
            id="OneTrainer",
        ),
        pytest.param(
            "lycoris_transformer_blocks_1_attn_to_out_0.lora_{down}.weight",
            B[:32],
            4.0,
            {OUT: 2.0 * B[:32]},
            id="LyCORIS",
        ),
        pytest.param("{OUT}.lora_{AB}.default.weight", B[:32], None, {OUT: B[:32]}, id="DiffSynth"),
        pytest.param("transformer.{OUT}.lora.{down}.weight", B[:32], None, {OUT: B[:32]}, id="SimpleTuner of 2024"),
        pytest.param("{OUT}.lora_{down}.weight", B[:32], 1.0, {OUT: 0.5 * B[:32]}, id="without a beginning"),
        pytest.param(
            "model.diffusion_model.double_blocks.0.img_attn.qkv.lora_{down}.weight",
            B,
            4.0,
            {linear: 2.0 * part for linear, part in zip(QKV, B.split(32), strict=True)},
            id="model.diffusion_model",
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_of_another_trainer_changes_the_weights_as_its_readers_have_it(
    keys: str, up: Tensor, alpha: float | None, changed: dict[str, Tensor], dtype: torch.dtype, tmp_path: Path
) -> None:
    given, tensors = trained("flux2_klein"), dict[str, Tensor]()
    for end, other, factor in (("A", "down", A), ("B", "up", up)):
        tensors[keys.format(OUT=OUT, AB=end, down=other)] = factor.to(dtype).clone()
    if alpha is not None:
        tensors[f"{keys.partition('.lora_')[0].format(OUT=OUT)}.alpha"] = torch.tensor(alpha, dtype=dtype)
    read = given.read(tensors, tmp_path)
    assert set(read) == {f"{linear}.lora_{end}" for linear in changed for end in "AB"}
    # diffusers knows no ``.alpha`` beside published names without ``lora_unet_``, and reads no file with one.
    reads = keys.startswith(("lora_unet_", "transformer.{OUT}.lora_", "diffusion_model.")) and not (
        alpha and "lora_unet" not in keys
    )
    stock = by_diffusers("flux2_klein", tensors) if reads else {}
    for linear, b in changed.items():
        ours = ALPHA / RANK * outputs(read[f"{linear}.lora_A"], read[f"{linear}.lora_B"])
        torch.testing.assert_close(ours, outputs(A.to(dtype), b.to(dtype)), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(stock.get(linear, ours), ours, rtol=1e-5, atol=1e-4)


def test_a_file_of_xlabs_is_read_as_by_diffusers(tmp_path: Path) -> None:
    generator, tensors = torch.Generator().manual_seed(4), dict[str, Tensor]()
    for block, names in (("double_blocks.0", {"qkv_lora1": 3, "proj_lora2": 1}), ("single_blocks.0", {"qkv_lora": 3})):
        for name, parts in names.items():
            tensors[f"{block}.processor.{name}.down.weight"] = torch.randn(RANK, 3072, generator=generator)
            tensors[f"{block}.processor.{name}.up.weight"] = torch.randn(parts * 3072, RANK, generator=generator)
    given, expected = trained("flux"), by_diffusers("flux", tensors)
    read = given.read(tensors, tmp_path)
    linears = {name.rpartition(".")[0] for name in read}
    assert linears == expected.keys()
    assert len(linears) == 7
    for linear in linears:
        ours = ALPHA / RANK * outputs(read[f"{linear}.lora_A"], read[f"{linear}.lora_B"])
        torch.testing.assert_close(ours, expected[linear], rtol=1e-4, atol=1e-2)


def test_smaller_ranks_of_a_file_are_filled_up_to_its_largest(tmp_path: Path) -> None:
    """The product stays, and each new row of A is one that can be trained."""
    given = trained("flux2_klein")
    small = {f"transformer.{QKV[0]}.lora_A.weight": A[:1].clone(), f"transformer.{QKV[0]}.lora_B.weight": B[:32, :1]}
    large = {f"transformer.{OUT}.lora_A.weight": A, f"transformer.{OUT}.lora_B.weight": B[:32]}
    read = given.read({key: tensor.contiguous() for key, tensor in (small | large).items()}, tmp_path)
    for linear, a, b in ((QKV[0], A[:1], B[:32, :1]), (OUT, A, B[:32])):
        assert read[f"{linear}.lora_A"].shape == (RANK, 32)
        ours = ALPHA / RANK * outputs(read[f"{linear}.lora_A"], read[f"{linear}.lora_B"])
        torch.testing.assert_close(ours, outputs(a, b), rtol=1e-5, atol=1e-4)
        assert read[f"{linear}.lora_A"].abs().amin() > 0
    again = given.read({key: tensor.contiguous() for key, tensor in (small | large).items()}, tmp_path)
    assert all(torch.equal(read[key], again[key]) for key in read)


def test_z_image_attention_in_one_lora_is_split(tmp_path: Path) -> None:
    a, b = torch.randn(RANK, 48), torch.randn(144, RANK)
    key = "lora_unet_layers_3_attention_qkv"
    tensors = {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b, f"{key}.alpha": torch.tensor(4.0)}
    read = trained("z_image").read(tensors, tmp_path)
    for end, part in zip("qkv", b.split(48), strict=True):
        assert torch.equal(read[f"layers.3.attention.to_{end}.lora_A"], a)
        assert torch.equal(read[f"layers.3.attention.to_{end}.lora_B"], part)


PROJ = "lora_unet_double_blocks_1_img_attn_proj"


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha": A}, "lora_te1_.* of a text encoder"),
        ({f"{PROJ}.dora_scale": A}, f"{PROJ}.dora_scale, of DoRA"),
        ({"transformer.x.lokr_w1": A}, "transformer.x.lokr_w1, of LoKr"),
        ({f"{PROJ}.hada_w1_a": A}, "of LoHa"),
        ({f"{PROJ}.diff_b": A}, "a whole difference"),
        (
            {"lora_transformer_x.lora_down.weight": A},
            "of OneTrainer holds lora_transformer_x.lora_down.weight, .* Flux2Transformer2DModel",
        ),
        ({"lycoris_x.lora_down.weight": A}, "of LyCORIS holds lycoris_x"),
        ({"double_blocks.0.processor.qkv_lora1.down.weight": A}, "of XLabs holds double_blocks.0.processor"),
        ({"a.lora_A.default.weight": A}, "of DiffSynth-Studio holds a.lora_A"),
        ({"lycoris_transformer_blocks_1_attn_to_out_0.lokr_w1": A}, "of LoKr"),
        ({f"base_model.model.{OUT}.lora_magnitude_vector.weight": A}, "of DoRA"),
        ({"bundle_emb.word.clip_l": A}, "an embedding of OneTrainer"),
        ({f"{PROJ}.alpha": torch.tensor(1e10)}, rf"alpha 10000000000.0 of {OUT}"),
        ({f"{PROJ}.lora_up.weight": B[:32].int()}, f"{PROJ}.lora_up.weight of I32"),
        ({f"{PROJ}.lora_up.weight": B[:32].to(torch.complex64)}, f"{PROJ}.lora_up.weight of C64"),
        ({f"{PROJ}.alpha": torch.tensor(1.0 + 2.0j)}, f"{PROJ}.alpha of C64"),
        ({"model.diffusion_model.final_layer.linear.weight": A}, "linear.weight, which is not a LoRA factor"),
        ({f"transformer.{OUT}.lora_A.weight": A, f"transformer.{OUT}.lora_B.weight": B[:32]}, f"{OUT} twice"),
        ({f"{PROJ}.lora_up.weight": None}, rf"{PROJ}: A is \[2, 32\], B \[0\]"),
        ({f"{PROJ}.lora_up.weight": B}, rf"96 rows of {PROJ}"),
        ({f"{PROJ}.lora_up.weight": B[:32] * torch.nan}, "NaN or Inf in .*lora_up"),
        ({f"{PROJ}.alpha": torch.tensor(0.0)}, rf"alpha 0.0 of {OUT}"),
        (
            {f"{PROJ}.lora_up.weight": torch.ones(32, 3), f"{PROJ}.lora_down.weight": torch.ones(3, 32)},
            rf"rank 3 of {OUT}; model.lora.rank is 2",
        ),
    ],
)
def test_what_a_run_cannot_begin_with_is_refused_by_name(
    more: dict[str, Tensor | None], problem: str, tmp_path: Path
) -> None:
    plain = {f"{PROJ}.lora_down.weight": A, f"{PROJ}.lora_up.weight": B[:32]}
    tensors = {key: tensor.clone() for key, tensor in (plain | more).items() if tensor is not None}
    with pytest.raises(UserError, match=problem):
        trained("flux2_klein").read(tensors, tmp_path)
