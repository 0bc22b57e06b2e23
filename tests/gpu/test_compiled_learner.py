"""On a GPU: gradients of a compiled learner, and what a compile cache that was filled with other attention does to it.

The published architectures at their full width, with two blocks of each kind and random weights.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from full_size import random_embeddings, transformer_only
from torch.profiler import ProfilerActivity, profile

from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.learning.policy_passes import PolicyPasses
from solrl_ray.models import attention
from solrl_ray.policy import adapters

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CONFIGS = Path(__file__).parents[2] / "configs"
FILES = {"flux": "flux1_dev", "sd3": "sd35_large", "sana": "sana_1600m"}
SAMPLES = 2


def config(family: str, *overrides: str) -> Config:
    given = ("prompts={train: unused, heldout: unused}", "rewards=[{kind: clipscore}]", "fleet.learners.num_gpus=1")
    files = [CONFIGS / "methods/sol_rl_published.yaml", CONFIGS / "models" / f"{FILES[family]}.yaml"]
    return load(files, [*given, f"learner.micro_batch={SAMPLES}", *overrides])


@pytest.fixture
def as_before() -> Iterator[None]:
    """Leaves this process with the attention and the compiled code that it had."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch._dynamo.reset()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)
    torch._functorch.config.activation_memory_budget = 1.0
    torch._dynamo.reset()


def gradient(settings: Config) -> torch.Tensor:
    """Of a loss over a micro-batch, all factors in one vector; none of the factors is zero."""
    model = transformer_only(settings.model.family, settings.model, "cuda", layers=2)
    passes = PolicyPasses(settings, model)
    factors, generator = adapters.parameters(model.transformer, "default"), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for factor in factors.values():
            factor.copy_(torch.randn(factor.shape, generator=generator) * 0.01)
    x_t = torch.randn(SAMPLES, *model.latent_shape, generator=generator).cuda()
    batch = model.batch_embeddings(random_embeddings(settings.model, SAMPLES))
    loss = passes.velocity(x_t, torch.tensor([0.2, 0.8], device="cuda"), batch).square().mean()
    found = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(factors.values()))]).double().cpu()
    del model, passes, factors, loss
    gc.collect()
    torch.cuda.empty_cache()
    return found


@pytest.mark.parametrize(
    ("family", "overrides", "kernels"),
    [
        ("flux", (), "flash"),
        ("sd3", (), "cudnn"),
        ("sana", (), "cudnn"),
        ("sd3", ("run.deterministic=true",), "flash"),
        ("sana", ("run.deterministic=true", "learner.activation_memory=0.5"), "flash"),
    ],
    ids=["flux", "sd3", "sana", "sd3 on flash", "sana on flash"],
)
def test_gradients_are_those_of_the_eager_learner(
    family: str, overrides: tuple[str, ...], kernels: str, as_before: None, tmp_path: Path
) -> None:
    compiled = gradient(config(family, f"compile.cache='{tmp_path}'", *overrides))
    assert attention.kernels() == kernels
    torch._dynamo.reset()
    eager = gradient(config(family, "compile.learner=false", "learner.activation_memory=1"))
    cosine = torch.nn.functional.cosine_similarity(compiled, eager, dim=0).item()
    print(f"{family} {kernels}: cosine {cosine:.7f}, norms {compiled.norm():.4g} and {eager.norm():.4g}")
    assert cosine > 0.9999
    assert compiled.norm() / eager.norm() == pytest.approx(1, abs=0.01)


# A compile cache


def base_pass(kernels: str, cache: str, identity: bool = True) -> None:
    """One pass of FLUX without adapters and without gradient, compiled with `kernels`; prints the names of attention's.
    On flash also the passes of a learner, as warm-ups. For a process of its own.

    Args:
        identity: False leaves out what keeps caches apart, to see that it is needed.
    """
    settings = config("flux", f"compile.cache='{cache}'")
    model = transformer_only("flux", settings.model, "cuda", layers=2)
    type(model).TRAINS_ON_CUDNN = kernels == "cudnn"  # of this process alone
    passes = PolicyPasses(settings, model)
    assert attention.kernels() == kernels
    if not identity:
        torch.compiler.config.cache_key_tag = ""
    embeddings = random_embeddings(settings.model, SAMPLES)
    x_t = torch.zeros(SAMPLES, *model.latent_shape, device="cuda")
    t, batch = torch.full((SAMPLES,), 0.5, device="cuda"), model.batch_embeddings(embeddings)
    adapters.use(model.transformer, "base")
    with torch.no_grad():
        passes.velocity(x_t, t, batch)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            passes.velocity(x_t, t, batch)
            torch.cuda.synchronize()
    names = {event.key.lower() for event in recorded.key_averages()}
    answer = {"kernels": sorted(name for name in names if "cudnn" in name or "flash" in name), "trained": False}
    if kernels == "flash" and identity:
        for policy in ("old", "default"):
            passes.warm_up(policy, embeddings[0])  # type: ignore[arg-type]
        torch.cuda.synchronize()
        answer["trained"] = True
    print(json.dumps(answer))


def in_own_process(kernels: str, cache: Path, folder: str, identity: bool = True) -> dict[str, Any]:
    """`base_pass` there; `folder`: PyTorch's own cache folder, set by the user."""
    code = f"from tests.gpu.test_compiled_learner import base_pass; base_pass({kernels!r}, {str(cache)!r}, {identity})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # pytest's, which has the benchmarks
    environment |= {"TORCHINDUCTOR_CACHE_DIR": folder} if folder else {}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(kernels, identity, answer)
    return answer


@pytest.mark.parametrize("own_folder", [False, True], ids=["compile.cache", "TORCHINDUCTOR_CACHE_DIR"])
def test_a_cache_that_was_filled_with_cudnns_attention_gives_a_flux_learner_none_of_it(
    own_folder: bool, tmp_path: Path
) -> None:
    folder = str(tmp_path / "inductor") if own_folder else ""
    filled = in_own_process("cudnn", tmp_path / "cache", folder)
    assert any("cudnn" in name for name in filled["kernels"])
    learner = in_own_process("flash", tmp_path / "cache", folder)
    assert learner["trained"]
    assert any("flash" in name for name in learner["kernels"])
    assert not any("cudnn" in name for name in learner["kernels"])
