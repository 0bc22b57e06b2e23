"""Classifier-free guidance: its formula, what it is equal to, and what the learner trains with it.

That every family draws what its stock pipeline draws is tested in `tests/unit/report/test_how_to_load.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from solrl_ray import models
from solrl_ray.config.guidance import Cfg
from solrl_ray.learning.policy_passes import PolicyPasses
from solrl_ray.models.base import DiffusionModel
from solrl_ray.policy import adapters
from solrl_ray.quantization.attestation import score_class
from solrl_ray.records import NEGATIVE
from tests.support import learning, tiny

SIGMAS = torch.tensor([0.2, 0.4, 0.9])
LATENTS = torch.randn(3, *learning.LATENT_SHAPE, generator=torch.Generator().manual_seed(3))
FLOW_GRPO = {"kind": "flow_grpo"}


def conditioning(model: DiffusionModel) -> dict[str, Tensor]:
    """Three prompts against a fourth text."""
    *own, negative = learning.embeddings(4).values()
    return model.batch_embeddings([each.against(negative) for each in own])


@pytest.fixture
def model(tiny_pipeline: Path) -> DiffusionModel:
    return models.load(tiny.model_config(tiny_pipeline), "cpu", components={"transformer"})


def guided(model: DiffusionModel, **cfg: Any) -> DiffusionModel:
    return model.with_guidance(model.config.model_copy(update={"cfg": Cfg(**cfg)}))


@torch.no_grad()
def test_guidance_acts_at_the_noise_levels_of_its_interval_in_one_forward_of_twice_the_samples(
    model: DiffusionModel,
) -> None:
    both = conditioning(model)
    assert {name for name in both if name.startswith(NEGATIVE)} == {NEGATIVE + name for name in learning_names()}
    negative = {name: both[NEGATIVE + name] for name in learning_names()}
    v, v_negative = (model.velocity(LATENTS, SIGMAS, texts) for texts in (both, negative))
    batches: list[int] = []
    model.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: batches.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    found = guided(model, scale=3.0, interval=(0.4, 0.8)).velocity(LATENTS, SIGMAS, both)
    assert batches == [6]
    expected = torch.stack([v[0], v[1] + 2 * (v[1] - v_negative[1]), v[2]])  # only the second level is inside
    assert (v[1] - v_negative[1]).norm() > 0.01 * v[1].norm()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def learning_names() -> set[str]:
    return set(learning.embeddings(1)["p0"].tensors)


def test_guidance_without_a_negative_prompt_is_an_error(model: DiffusionModel) -> None:
    texts = model.batch_embeddings(list(learning.embeddings().values()))
    with pytest.raises(ValueError, match="negative prompt"):
        guided(model, scale=2.0).velocity(LATENTS, SIGMAS, texts)


@torch.no_grad()
def test_an_evaluation_may_feed_another_number_to_the_guidance_embedding(tmp_path: Path) -> None:
    path = tiny.build_pipeline(tmp_path / "p", guidance_embeds=True)
    trained, expected = (
        models.load(tiny.model_config(path, guidance=number), "cpu", components={"transformer"}) for number in (1, 7)
    )
    config = learning.config(path, model=trained.config, evaluation={"guidance": 7})
    evaluated = trained.with_guidance(config.evaluated_model)
    texts = conditioning(trained)
    found = evaluated.velocity(LATENTS, SIGMAS, texts)
    assert torch.equal(found, expected.velocity(LATENTS, SIGMAS, texts))
    assert not torch.equal(found, trained.velocity(LATENTS, SIGMAS, texts))


def test_an_embedding_with_another_negative_prompt_has_another_digest() -> None:
    one, other, third = learning.embeddings().values()
    assert len({one.digest, one.against(other).digest, one.against(third).digest}) == 3
    made = one.against(other)
    assert made.prompt_id == one.prompt_id
    assert torch.equal(made.tensors[NEGATIVE + "prompt_embeds"], other.tensors["prompt_embeds"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("objective", "factor"), [({}, 1), (FLOW_GRPO, 4)])
def test_the_learner_trains_what_its_objective_says_and_never_through_the_negative_prompt(
    objective: dict[str, Any], factor: int, dtype: str, tiny_pipeline: Path
) -> None:
    """d(v_negative + 4 (v - v_negative)) = 4 dv if v_negative is a constant; a power of two rounds nothing."""
    gradients = []
    for cfg in (Cfg(), Cfg(scale=4.0)):
        settings = tiny.model_config(tiny_pipeline, dtype=dtype, cfg=cfg)
        sampler = {"kind": "flow_sde"} if objective else {"kind": "ode"}
        config = learning.config(
            tiny_pipeline,
            model=settings,
            objective=objective,
            rollout={"sampler": sampler, "explore": {"precision": "nvfp4-emulated"}, "regenerate": {"steps": 5}},
        )
        model = models.load(settings, "cpu", components={"transformer"})
        passes = PolicyPasses(config, model)
        adapters.use(model.transformer, "default")
        passes.velocity(LATENTS, SIGMAS, conditioning(model)).sum().backward()
        factors = adapters.parameters(model.transformer, "default")
        gradients.append({name: each.grad for name, each in factors.items() if name.endswith("lora_B")})
        with torch.no_grad():  # as v_old: an unchanged policy has a ratio of exactly 1
            v_old = passes.velocity(LATENTS, SIGMAS, conditioning(model))
        assert torch.equal(v_old, passes.velocity(LATENTS, SIGMAS, conditioning(model)))
    for name, gradient in gradients[0].items():
        assert gradient is not None
        assert gradient.abs().max() > 0
        found = gradients[1][name]
        assert found is not None
        torch.testing.assert_close(found, factor * gradient, atol=0, rtol=1e-5)


def test_guidance_is_part_of_a_score_class_only_if_it_is_on() -> None:
    cpu = torch.device("cpu")

    def of(cfg: Cfg | None) -> str:
        return score_class(cpu, "float32", micro_batch=4, threads=1, cfg=cfg)

    assert of(None) == of(Cfg())
    assert len({of(Cfg()), of(Cfg(scale=2.0)), of(Cfg(scale=2.0, negative_prompt="dull"))}) == 3


def test_the_negative_prompt_of_a_batch_is_one_copy(model: DiffusionModel) -> None:
    texts = conditioning(model)["negative_prompt_embeds"]
    assert texts.shape[0] == 3
    assert texts.untyped_storage().nbytes() == texts[0].nbytes
