"""What is compiled, and that compiled blocks compute what they are told and take new weights without recompiling."""

import copy
import itertools
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from actors.workers.explorer import Explorer
from solrl_ray import models
from solrl_ray.config.resolution import MOST
from solrl_ray.config.schema import Compile, Config, QuantizationScope
from solrl_ray.errors import UserError
from solrl_ray.models import attention
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.compilation import cache_folder, compile_, compile_decoder, compiles, prepare, what_compiles
from solrl_ray.models.components import blocks
from solrl_ray.quantization.formats import pack
from solrl_ray.quantization.scope import quantize_, quantized_layers
from solrl_ray.records import Prompt, PromptEmbedding, Receipt, WorkUnit
from solrl_ray.weight_sync.publication import Publication
from solrl_ray.weight_sync.publish import Publisher, touched_linears
from tests.support import tiny
from tests.support.small import small_config
from tests.unit.quantization.test_scope import SKIP, inputs, transformer

CPU = torch.device("cpu")
ON = Compile(enabled=True)
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Environment variables of PyTorch's caches of compiled code."""


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts what is compiled, which runs as it would without."""
    found, compiled = CompileCounterWithBackend("eager"), nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda m, *, mode, **how: compiled(m, backend=found, **how))
    torch._dynamo.reset()
    return found


def test_gpus_compile_and_cpus_do_not_unless_told() -> None:
    assert compiles(Compile(), torch.device("cuda"), "fp8")
    assert not compiles(Compile(), CPU, "fp8")
    assert compiles(ON, CPU, "float32")
    assert not compiles(Compile(enabled=False), torch.device("cuda"), "bf16")


def test_the_emulation_keeps_its_bits_and_is_not_compiled() -> None:
    model = transformer()
    assert compile_(model, ON, CPU, "nvfp4-emulated") == "no: tier nvfp4-emulated keeps the reference's bits"
    assert all(block._compiled_call_impl is None for block in blocks(model))


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="Linear has no list of blocks to compile"):
        compile_(nn.Linear(2, 2), ON, CPU, "float32")


def test_compiled_code_is_kept_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder(str(tmp_path)) == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder("") == tmp_path / "cache" / "solrl_ray" / "compiled"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"compile\.cache: the folder .*file/below cannot be created"):
        compile_(transformer(), Compile(enabled=True, cache=str(tmp_path / "file" / "below")), CPU, "float32")


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ("", False),
        ("/tmp/torchinductor_somebody", False),
        ("/tmp/torchinductor_x/triton/0", False),
        ("/data/own", True),
    ],
)
def test_a_cache_folder_that_the_user_has_set_for_pytorch_stays_and_pytorchs_own_does_not(
    found: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    for variable in CACHES:
        monkeypatch.setenv(variable, found)
    with torch.compiler.config.patch(cache_key_tag=""):  # type: ignore[attr-defined]
        compile_(transformer(), Compile(enabled=True, cache=str(tmp_path)), CPU, "float32")
    for variable in CACHES:
        assert (os.environ[variable] == found) == kept
        assert os.environ[variable].startswith(str(tmp_path)) != kept


def test_code_that_was_compiled_for_other_attention_kernels_is_not_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in CACHES:
        monkeypatch.setenv(variable, "")
    before, hits = attention.kernels(), []
    try:
        with torch.compiler.config.patch(cache_key_tag=""):  # type: ignore[attr-defined]
            for kernels in ("cudnn", "flash", "cudnn"):
                attention.use(kernels)
                prepare(Compile(enabled=True, cache=str(tmp_path)))
                torch._dynamo.reset()
                counters.clear()
                torch.compile(lambda x: x.sin() + 1)(torch.ones(4))
                hits.append(counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"])
    finally:
        attention.use(before)
        torch._dynamo.reset()
    assert [hit > 0 for hit in hits] == [False, False, True]


def test_five_revisions_are_taken_without_compiling_again(counter: CompileCounterWithBackend) -> None:
    model = transformer()
    quantize_(model, "fp8", QuantizationScope(skip=SKIP), without_kernels=True)
    eager = copy.deepcopy(model)
    for block in blocks(model):
        block.compile(fullgraph=True, dynamic=False, mode="default")
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        for revision in range(5):
            for index, (name, layer) in enumerate(quantized_layers(model).items()):
                generator = torch.Generator().manual_seed(100 * revision + index)
                weight = torch.randn(layer.out_features, layer.in_features, generator=generator) / 8
                layer.load(pack("fp8-row", weight))
                quantized_layers(eager)[name].load(layer.tensors())
            seen.append(model(**inputs()).sample)
            assert torch.equal(seen[-1], eager(**inputs()).sample)
            assert counter.frame_count == 2  # one graph a kind of block, in the first revision
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(seen))


@pytest.mark.parametrize("cfg", ["{}", "{scale: 3, interval: [0.3, 0.7]}"], ids=["unguided", "guided at some levels"])
@pytest.mark.parametrize("shapes", [[[32, 32]], [[32, 32], [24, 40]]], ids=["one shape", "two shapes"])
def test_after_the_warm_ups_of_an_explorer_neither_its_revision_nor_its_units_compile_anything(
    shapes: list[list[int]], cfg: str, counter: CompileCounterWithBackend
) -> None:
    sizes = ("rollout.explore.precision=float32", "compile.enabled=true", f"model.resolution={shapes}")
    config = small_config(Path("unused"), "unused", *sizes, f"model.cfg={cfg}")
    explorer = Explorer("explorer-0", config)
    attestation = explorer.start()
    assert counter.frame_count == 0
    texts = models.load(config.model, "cpu", components={"text"}).encode(["a red circle", ""])
    embedding, negative = (PromptEmbedding(prompt_id="p", tensors=each, digest="p") for each in texts)
    if config.model.cfg.is_on:
        embedding = embedding.against(negative)
    for shape in range(attestation.warm_ups):
        explorer.warm_up(shape, embedding)
    known = counter.frame_count
    assert attestation.warm_ups == 1 + len(shapes)  # the probe's forward, too
    assert known > 0
    base = models.load(config.model, "cpu", components={"transformer"}).transformer
    revision = Publisher.for_model(base, config, tier="float32").build(0, lora_factors(base, config))
    receipt = explorer.load_revision(Publication(revision=revision, mode="packed").payload("explorer"), embedding, True)
    assert isinstance(receipt, Receipt)
    unit = WorkUnit(stage="explore", iteration=0, revision=0, prompt_id="p", indices=(0, 1, 2, 3))
    for shape in config.model.shapes:
        explorer.explore(unit, Prompt(id="p", text="a red circle", shape=shape), embedding)
    assert counter.frame_count == known


def lora_factors(transformer: nn.Module, config: Config) -> dict[str, torch.Tensor]:
    rank = config.model.lora.rank
    return {
        f"{path}.{name}": torch.full(shape, 0.01)
        for path, linear in touched_linears(transformer, config.model.lora.targets).items()
        for name, shape in (("lora_A", (rank, linear.in_features)), ("lora_B", (linear.out_features, rank)))
    }


def test_a_decoder_is_compiled_only_when_it_is_asked_for_and_is_then_part_of_the_score_class() -> None:
    decoder = tiny.kl_vae(tiny=True)
    said = compile_decoder(decoder, ON, CPU)
    assert said == "no: compile.decoder is false"
    assert what_compiles("2 blocks, mode default", said) == "2 blocks, mode default"
    said = compile_decoder(decoder, Compile(decoder=True), CPU)
    assert said == "no: compile.enabled is not true, and this is no GPU"
    assert what_compiles("no: tier", said) == ""
    assert decoder.decoder._compiled_call_impl is None
    said = compile_decoder(decoder, Compile(enabled=True, decoder=True), CPU)
    assert said == "DecoderTiny, mode default"
    assert what_compiles("no: tier", said) == said
    assert decoder.decoder._compiled_call_impl is not None


@pytest.mark.parametrize("family", ["flux", "flux with a small decoder", "sana"])
def test_each_kind_of_decoder_is_one_graph_for_all_its_images(
    family: str, tmp_path: Path, counter: CompileCounterWithBackend
) -> None:
    model = _decoding(family, tmp_path)
    latents = torch.randn(4, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    wanted = model.decode(latents)
    model.decoder.get_submodule("decoder").compile(fullgraph=True, dynamic=False, mode="default")
    assert torch.equal(model.decode(latents), wanted)
    assert counter.frame_count == 1  # two images at once, twice


def _decoding(family: str, folder: Path) -> DiffusionModel:
    if family == "sana":
        path = tiny.build_sana(folder / "sana")
    else:
        path = tiny.build_pipeline(folder / "flux", tiny_vae="small" in family)
    config = tiny.model_config(path, family=family.split()[0], decoding={"micro_batch": 2})
    return models.load(config, "cpu", components={"vae"})


def test_as_many_shapes_as_a_run_may_have_do_not_exceed_the_compilers_limit(counter: CompileCounterWithBackend) -> None:
    """Ten forwards of each shape (see `VARIANTS`) in three kinds of block of one class, as SD3.5-Medium has them."""

    class Block(nn.Module):
        def __init__(self, kind: int) -> None:
            super().__init__()
            self.kind = kind

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.kind

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer_blocks = nn.ModuleList(map(Block, range(3)))

    model = Blocks()
    compile_(model, ON, CPU, "bf16")
    forwards = 10 * MOST
    for size in range(1, forwards + 1):
        for block in model.transformer_blocks:
            block(torch.ones(size, 2))
    assert counter.frame_count == 3 * forwards
