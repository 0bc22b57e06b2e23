"""A compiled learner: what is compiled and when, that its gradients are the eager ones', and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from solrl_ray import models
from solrl_ray.config import compiled_learner
from solrl_ray.config.loading import Sources
from solrl_ray.config.schema import Compile, Config
from solrl_ray.errors import UserError
from solrl_ray.learning.learner import Learner
from solrl_ray.learning.policy_passes import PolicyPasses
from solrl_ray.models import attention
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.compilation import compile_learner
from solrl_ray.planning.update import passes
from solrl_ray.policy import adapters
from solrl_ray.policy.digest import lora_digest
from solrl_ray.records import PromptEmbedding, SampleGroup
from solrl_ray.storage import continuation
from tests.support import families, tiny
from tests.support.learning import config as learning_config

CPU = torch.device("cpu")
SIZES = (5, 3, 4)
"""Samples of each prompt; in micro-batches of 4, of one prompt and of several."""
BUILDERS = families.BUILDERS | {"sd3": partial(tiny.build_sd3, dual_attention=False)}  # as SD3.5-Large
ALIKE = ("sana", "qwen_image")
"""Families whose two blocks are of one kind, which one of them shows."""
AUTOGRAD = pytest.mark.parametrize("counter", ["aot_eager"], indirect=True)
"""Forward and backward as AOT autograd divides them."""
Start = Callable[..., tuple[Learner, "Inputs"]]


@pytest.fixture
def counter(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[CompileCounterWithBackend]:
    """Counts what is compiled, for a backend that makes no C++."""
    found = CompileCounterWithBackend(getattr(request, "param", "eager"))
    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda m, *, mode, **how: compiled(m, backend=found, **how))
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    torch._dynamo.reset()
    budget, tag = torch._functorch.config.activation_memory_budget, torch.compiler.config.cache_key_tag
    yield found
    torch._functorch.config.activation_memory_budget = budget
    torch.compiler.config.cache_key_tag = tag
    torch._dynamo.reset()


def settings(pipeline: tuple[str, Path], *, compiled: bool = True, **learner: Any) -> Config:
    family, path = pipeline
    return learning_config(
        path, model=families.model_config(family, path), learner=learner, compile=Compile(learner=compiled)
    )


class Inputs:
    """What updates of a model learn from."""

    def __init__(self, config: Config, shape: tuple[int, ...]) -> None:
        model: Any = models.load(config.model, CPU, components=models.encoder_components(config.model))
        texts, size = ["a red circle", "a dog", "two cats"], config.model.shapes[0].dims[-2:]
        pictures = torch.Generator().manual_seed(2)
        seen = torch.randint(256, (3, config.model.references, 3, *size), generator=pictures).to(torch.uint8)
        encoded = model.encode_seeing(texts, seen) if config.model.references else model.encode(texts)
        self.embeddings = {
            f"p{i}": PromptEmbedding(prompt_id=f"p{i}", tensors=tensors, digest=str(i))
            for i, tensors in enumerate(encoded)
        }
        self._shape = shape

    def groups(self, iteration: int) -> list[SampleGroup]:
        generator = torch.Generator().manual_seed(iteration)
        return [
            SampleGroup(
                iteration=iteration,
                revision=iteration,
                prompt_id=f"p{i}",
                indices=tuple(range(size)),
                rewards=tuple(torch.rand(size, generator=generator).tolist()),
                latents=torch.randn(size, *self._shape, generator=generator),
            )
            for i, size in enumerate(SIZES)
        ]


@pytest.fixture
def start(group_of_one: None) -> Iterator[Start]:
    learners = []

    def make(config: Config) -> tuple[Learner, Inputs]:
        model = models.load(config.model, CPU, components={"transformer"})
        learners.append(Learner(config, model, 0, 1))
        return learners[-1], Inputs(config, model.latent_shape)

    yield make
    for learner in learners:
        learner.close()


def warmed_up(config: Config, learner: Learner, inputs: Inputs, counter: CompileCounterWithBackend) -> int:
    """Compile all that updates need; how much has been compiled by then."""
    assert "blocks, mode default, activation memory 1" in learner.compiled
    known = [counter.frame_count]
    for policy in passes(config):
        assert learner.warm_up(policy, inputs.embeddings["p0"]) > 0  # type: ignore[arg-type]
        known.append(counter.frame_count)
    assert passes(config) == ("base", "old", "default")
    assert 0 == known[0] < known[1] < known[2] < known[3]  # each kind has its own code
    return known[-1]


@AUTOGRAD
def test_the_warm_up_changes_no_bit_and_compiled_updates_end_near_the_eager_ones(
    tiny_pipeline: Path, start: Start, counter: CompileCounterWithBackend
) -> None:
    ended, pipeline = {}, ("flux", tiny_pipeline)
    for name in ("compiled and warmed up", "compiled", "eager"):
        config = settings(pipeline, compiled=name != "eager")
        learner, inputs = start(config)
        known = warmed_up(config, learner, inputs, counter) if "warmed" in name else None
        for iteration in range(2):
            learner.update(iteration, inputs.groups(iteration), inputs.embeddings)
            assert known in (None, counter.frame_count)
        ended[name] = learner.factors("default")
    assert lora_digest(ended["compiled"]) == lora_digest(ended["compiled and warmed up"])
    for factor, value in ended["eager"].items():
        torch.testing.assert_close(ended["compiled"][factor], value, atol=2e-3, rtol=2e-2)


@AUTOGRAD
@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("flux", 0.0),
        ("flux2_klein", 0.5),
        ("sd3", 0.5),
        ("sana", 1.0),
        ("sana_video", 0.0),
        ("qwen_image", 0.5),
        ("wan", 0.5),
        ("wan_i2v", 0.5),
        ("z_image", 0.0),
    ],
)
def test_gradients_are_those_of_the_eager_learner_whatever_is_kept(
    family: str, kept: float, tmp_path: Path, counter: CompileCounterWithBackend
) -> None:
    blocks = {"blocks": 1} if family in ALIKE else {}
    pipeline = family, BUILDERS[family](tmp_path / "pipeline", **blocks)
    compiled = gradient(settings(pipeline, activation_memory=kept))
    assert torch._functorch.config.activation_memory_budget == kept
    eager = gradient(settings(pipeline, compiled=False))
    cosine = torch.nn.functional.cosine_similarity(compiled, eager, dim=0)
    assert eager.norm() > 0
    assert cosine > 0.99999


def gradient(config: Config) -> torch.Tensor:
    """Of a loss over one micro-batch, all factors in one vector; B is not zero, so that A has one, too."""
    model = models.load(config.model, CPU, components={"transformer"})
    made = PolicyPasses(config, model)
    factors = adapters.parameters(model.transformer, "default")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for factor in factors.values():
            factor.copy_(torch.randn(factor.shape, generator=generator) * 0.1)
    batch = model.batch_embeddings(list(Inputs(config, model.latent_shape).embeddings.values()))
    x_t = torch.randn(3, *model.latent_shape, generator=generator)
    loss = made.velocity(x_t, torch.tensor([0.2, 0.5, 0.8]), batch).square().mean()
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(factors.values()))])


# What is settled, and when


@pytest.mark.parametrize(
    ("gpus", "learner", "memory", "settled"),
    [
        (0.0, None, None, (False, 0.0)),
        (1.0, None, None, (True, None)),  # its card decides
        (1.0, None, 0.5, (True, 0.5)),
        (0.5, False, None, (False, 0.0)),
        (0.0, True, 0.25, (True, 0.25)),
        (1.0, False, 1.0, (False, 1.0)),
    ],
)
def test_both_settings_are_settled_by_the_learners_gpus_and_kept_by_a_resumed_run(
    tiny_pipeline: Path, gpus: float, learner: bool | None, memory: float | None, settled: tuple[bool, float | None]
) -> None:
    given = learning_config(
        tiny_pipeline,
        learner={"activation_memory": memory},
        compile=Compile(learner=learner),
        fleet={"learners": {"num_gpus": gpus}},
    )
    was = compiled_learner.resolve_auto(given)
    assert (was.compile.learner, was.learner.activation_memory) == settled
    assert compiled_learner.resolve_auto(was) == was
    cpus = given.fleet.learners.model_copy(update={"num_gpus": 0.0})
    elsewhere = given.model_copy(update={"fleet": given.fleet.model_copy(update={"learners": cpus})})
    resumed = continuation.inherit_from(elsewhere, was)
    assert (resumed.compile.learner, resumed.learner.activation_memory) == settled
    continuation.check(resumed, was, Path("runs/run"), Sources())
    other = compiled_learner.resolve_auto(given.model_copy(update={"compile": Compile(learner=not settled[0])}))
    with pytest.raises(UserError, match=r"^(learner\.activation_memory|compile\.learner) is .* was begun with"):
        continuation.check(other, was, Path("runs/run"), Sources())


# What is refused


def test_a_transformer_without_blocks_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"compile\.learner is true, but nothing can be compiled: Linear has no list of blocks; set it to",
    ):
        compile_learner(nn.Linear(2, 2), Compile(learner=True), CPU, 1.0)


def test_a_machine_without_a_compiler_is_refused(tiny_pipeline: Path) -> None:
    import torch._inductor.config

    config = settings(("flux", tiny_pipeline))
    model = models.load(config.model, CPU, components={"transformer"})
    with (
        torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)}),
        pytest.raises(UserError, match=r"nothing can be compiled: there is no C\+\+ compiler \(environment variable"),
    ):
        PolicyPasses(config, model)


# Attention


def test_compiled_code_of_other_attention_kernels_has_another_key_in_the_same_folder_whichever_comes_first(
    counter: CompileCounterWithBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_pipeline: Path
) -> None:
    import os

    before = torch.backends.cuda.cudnn_sdp_enabled()
    model: DiffusionModel = models.load(tiny.model_config(tiny_pipeline), CPU, components={"transformer"})
    found = []
    try:
        for cudnn in (True, False):
            monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
            monkeypatch.delenv("TRITON_CACHE_DIR")
            attention.choose_for_training(cudnn=cudnn)
            said = compile_learner(model.transformer, Compile(learner=True, cache=str(tmp_path / "c")), CPU, 1.0)
            assert said.endswith("cudnn attention" if cudnn else "flash attention")
            variables = os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]
            found.append((*variables, torch.compiler.config.cache_key_tag))
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    (*folders, first), (*same, second) = found
    assert folders == same
    assert first != second


@pytest.mark.parametrize(
    ("family", "cudnn"),
    [("flux", False), ("sd3", True), ("sana", True), ("flux2_klein", False), ("qwen_image", False), ("z_image", False)],
)
def test_only_families_that_train_on_cudnns_attention_may_use_it_and_not_if_deterministic(
    family: str, cudnn: bool, tmp_path: Path, counter: CompileCounterWithBackend
) -> None:
    config = settings((family, BUILDERS[family](tmp_path / "pipeline")))
    repeatable = config.model_copy(update={"run": config.run.model_copy(update={"deterministic": True})})
    eager = config.model_copy(update={"compile": Compile(learner=False)})
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for given, expected in ((config, cudnn), (repeatable, False), (eager, False)):
            PolicyPasses(given, models.load(given.model, CPU, components={"transformer"}))
            assert torch.backends.cuda.cudnn_sdp_enabled() == expected
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
