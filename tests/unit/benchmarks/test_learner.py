"""What the benchmark of a learner's passes measures."""

from __future__ import annotations

from argparse import Namespace

import learner


def test_the_model_that_is_named_is_measured_not_another_of_its_family() -> None:
    arguments = Namespace(model="wan22", device="cpu", layers=1, batch=1, deterministic=False)
    arguments.set = ["model.resolution=64", "model.frames=5"]
    side = learner.Side(learner.settled(arguments, compile__learner=False), arguments)
    settings = side.model.transformer.config
    assert settings.num_attention_heads * settings.attention_head_dim == 3072  # the smallest Wan has 1536 channels
    assert side.gradient().norm() > 0


def test_flash_attention_is_a_side_of_its_own_only_where_a_family_trains_on_cudnns() -> None:
    def names(model: str) -> list[str]:
        arguments = Namespace(model=model, memory=[1.0], deterministic=False, batch=None, device="cpu", set=[])
        return [name for name, _ in learner.sides(arguments)]

    assert "compiled, activation memory 1, flash attention" in names("sd3")
    assert names("flux_kontext") == names("wan22") == ["eager", "compiled, activation memory 1"]
