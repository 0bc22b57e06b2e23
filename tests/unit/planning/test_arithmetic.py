"""The printed arithmetic, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.planning.arithmetic import ModelFacts, describe, evaluation_points
from tests.support.command_line import solrl
from tests.support.made_configs import MODEL

BASE = f"""{MODEL}
prompts: {{train: train.txt, heldout: heldout.txt}}
rewards: [{{kind: clipscore, path: some/clip}}]
"""
FLUX = ModelFacts(
    latent_shape=(1024, 64),
    parameters=11_901_408_320,
    lora_modules=190,
    lora_parameters=37_355_520,
    packed_bytes=1_008_599_040,
    packed_tier="nvfp4-emulated",
)


@pytest.fixture
def configure(tmp_path: Path):  # type: ignore[no-untyped-def]
    file = tmp_path / "base.yaml"
    file.write_text(BASE)

    def configured(*overrides: str) -> Config:
        return load([file], overrides)

    return configured


def test_the_published_iteration_has_4608_candidates_and_1152_samples(configure) -> None:  # type: ignore[no-untyped-def]
    numbers = describe(configure("objective.timestep_fraction=0.4"), FLUX)
    assert numbers.candidates == 48 * 96 == 4608
    assert numbers.explore_units == 48 * 4 == 192
    assert numbers.explore_forwards == 192 * 6 == 1152
    assert numbers.samples == 48 * 24 == 1152
    assert (numbers.regenerate_units, numbers.regenerate_forwards, numbers.padded_images) == (48, 480, 0)
    assert numbers.trained_timesteps == 4
    assert (numbers.micro_batches, numbers.backwards, numbers.forwards_without_gradient) == (96, 384, 768)
    assert numbers.latents_bytes == 1152 * 1024 * 64 * 4 == 301_989_888
    assert numbers.lora_bytes == 149_422_080
    assert numbers.revision_bytes == 149_422_080 + 1_008_599_040


def test_a_rank_gets_its_share_and_the_reference_forward_goes_with_the_kl_term(configure) -> None:  # type: ignore[no-untyped-def]
    numbers = describe(configure("learner.world_size=8", "objective.kl=0"), FLUX)
    assert (numbers.micro_batches, numbers.backwards, numbers.forwards_without_gradient) == (12, 72, 72)
    assert numbers.padded_samples == 0


def test_each_epoch_costs_what_the_first_does_and_the_forwards_of_the_policy_that_drew_the_samples(configure) -> None:  # type: ignore[no-untyped-def]
    changes = ("objective={kl: 0, clip_range: 0.1, old_decay: {kind: copy}}", "learner={updates: 3, world_size: 5}")
    once, twice = (describe(configure(*changes, f"learner.epochs={n}"), FLUX) for n in (1, 2))
    assert once.micro_batches == 3 * 7  # 384 samples a step in 60 slots
    assert (twice.micro_batches, twice.backwards) == (2 * once.micro_batches, 2 * once.backwards)
    assert (once.padded_samples, twice.padded_samples) == (3 * 36, 2 * 3 * 36)
    assert once.forwards_without_gradient == once.backwards * 2 / 3  # all but the first step's
    assert twice.forwards_without_gradient == twice.backwards * 5 / 6
    rows = dict(twice.rows())
    assert "× 2 epochs on 5 ranks" in rows["learn"]
    assert "6 optimiser steps" in rows["learn"]
    assert f"{20 * 6:,} optimiser steps" in rows["whole run"]


def test_a_range_of_steps_has_so_many_fewer_passes(configure) -> None:  # type: ignore[no-untyped-def]
    numbers = describe(configure("objective={timestep_fraction: 0.6, step_range: [0, 5]}"), FLUX)
    assert (numbers.trained_timesteps, numbers.backwards) == (3, 96 * 3)
    sampler = "rollout.sampler={kind: flow_sde}"
    numbers = describe(configure("objective={kind: flow_grpo, step_range: [2, 9]}", sampler), FLUX)
    assert numbers.trained_timesteps == 7


def test_the_rewards_stand_with_their_weights(configure) -> None:  # type: ignore[no-untyped-def]
    rows = dict(describe(configure("rewards=[{kind: ocr}, {kind: 'mine.py:redness', weight: 0.2}]"), FLUX).rows())
    assert rows["rewards"] == "ocr + mine.py:redness × 0.2"


@pytest.mark.parametrize(
    ("kl", "kind", "forwards"),
    [("1e-4", "linear", 2 * 576), ("1e-4", "copy", 576), ("0", "linear", 576), ("0", "copy", 0)],
)
def test_forwards_without_gradient_are_those_that_v_theta_does_not_serve(
    configure,  # type: ignore[no-untyped-def]
    kl: str,
    kind: str,
    forwards: int,
) -> None:
    numbers = describe(configure(f"objective.kl={kl}", f"objective.old_decay.kind={kind}"), FLUX)
    assert numbers.backwards == 96 * 6 == 576
    assert numbers.forwards_without_gradient == forwards
    assert f"{forwards:,} forwards (" in dict(numbers.rows())["learn"]


@pytest.mark.parametrize(
    ("objective", "forwards"),
    [("diffusion_nft, kl: 1e-4", 2 * 576), ("flow_grpo, kl: 0.01", 3 * 480), ("dance_grpo", 192)],
)
def test_a_guided_velocity_needs_a_forward_of_the_negative_prompt(configure, objective: str, forwards: int) -> None:  # type: ignore[no-untyped-def]
    """Of 96 micro-batches DiffusionNFT trains 6 levels, of two compared policies, on the prompt alone. Flow-GRPO trains
    5 transitions (window) of v_theta, v_reference and their negative prompts, DanceGRPO 2 of v_theta.
    """
    window = "rollout.sampler={kind: cps, window: {size: 5, range: [0, 8]}}"
    guided = configure(f"objective={{kind: {objective}}}", window, "model.cfg.scale=4")
    if objective == "dance_grpo":
        guided = configure("objective={kind: dance_grpo, timestep_fraction: 0.4}", window, "model.cfg.scale=4")
    numbers = describe(guided, FLUX)
    assert numbers.forwards_without_gradient == forwards
    assert "scale 4" in dict(numbers.rows())["guide"]
    assert "guide" not in dict(describe(configure(), FLUX).rows())


def test_memory_counts_weights_by_dtype_and_what_a_learner_rank_trains_with(configure) -> None:  # type: ignore[no-untyped-def]
    one, four = (describe(configure(f"learner.world_size={n}"), FLUX) for n in (1, 4))
    assert one.weights_bytes == 2 * 11_901_408_320
    assert describe(configure("model.dtype=float32"), FLUX).weights_bytes == 4 * 11_901_408_320
    # default, old, EMA, gradient: 4; AdamW's copy and two moments: 3, shared by the ranks.
    assert one.training_bytes == 7 * 4 * 37_355_520
    assert four.training_bytes == 4 * 4 * 37_355_520 + 3 * 37_355_520


@pytest.mark.parametrize(
    ("overrides", "gigabytes"),
    [
        ((), 1.2),  # not compiled: all is computed again
        (("fleet.learners.num_gpus=1",), 6.6),
        (("fleet.learners.num_gpus=1", "learner.activation_memory=1"), 12),
    ],
)
def test_activations_are_those_of_a_micro_batch(configure, overrides: tuple[str, ...], gigabytes: float) -> None:  # type: ignore[no-untyped-def]
    facts = replace(FLUX, recomputed_bytes=10**8, activation_bytes=10**9)  # a micro-batch has 12 samples
    numbers = describe(configure(*overrides), facts)
    assert numbers.activation_bytes == pytest.approx(gigabytes * 1e9)
    assert f"{gigabytes:g} GB of activations" in dict(numbers.rows())["memory"]


def test_what_does_not_fill_a_micro_batch_is_counted_as_padding(configure) -> None:  # type: ignore[no-untyped-def]
    numbers = describe(
        configure("rollout.prompts=5", "rollout.keep=10", "rollout.regenerate.micro_batch=4", "learner.micro_batch=12"),
        FLUX,
    )
    assert (numbers.regenerate_units, numbers.padded_images) == (15, 10)
    assert (numbers.micro_batches, numbers.padded_samples) == (5, 10)


def test_with_several_shapes_each_prompt_has_micro_batches_of_its_own(configure) -> None:  # type: ignore[no-untyped-def]
    sizes = ("rollout.prompts=5", "rollout.keep=10", "rollout.regenerate.micro_batch=4", "learner.micro_batch=4")
    one = describe(configure(*sizes), FLUX)
    assert (one.micro_batches, one.padded_samples) == (13, 2)
    several = describe(configure(*sizes, "model.resolution=[[512, 512], [256, 512]]"), FLUX)
    assert (several.micro_batches, several.padded_samples) == (15, 10)
    two_ranks = describe(configure(*sizes, "model.resolution=[[512, 512], [256, 512]]", "learner.world_size=2"), FLUX)
    assert (two_ranks.micro_batches, two_ranks.padded_samples) == (8, 14)


@pytest.mark.parametrize(
    ("every", "points"), [(0, (0, 20)), (5, (0, 5, 10, 15, 20)), (8, (0, 8, 16, 20)), (30, (0, 20))]
)
def test_the_policy_is_evaluated_first_last_and_every_so_often(configure, every: int, points: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    assert evaluation_points(configure(f"evaluation.every={every}")) == points


def test_the_table_keeps_its_width_and_counts_the_whole_run(configure) -> None:  # type: ignore[no-untyped-def]
    table = describe(configure(), FLUX).table()
    assert max(map(len, table.splitlines())) <= 100
    assert "whole run 92,160 candidates, 23,040 samples, 20 optimiser steps" in " ".join(table.split())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["rollout.explore.precision=fp8"], "(dpm2, fp8) · 25% of the transformer's weights quantised · 192 units"),
        (
            ["fleet.explorers.num_gpus=1"],
            "whichever the GPU supports) · at most 25% of the transformer's weights quantised ·",
        ),
        (["rollout={strategy: quantized, explore: {precision: fp8}}"], "(dpm2, fp8) · 25% of the transformer's"),
    ],
)
def test_previews_stand_with_the_share_of_weights_that_is_quantised(  # type: ignore[no-untyped-def]
    settings: list[str], words: str, configure
) -> None:
    facts = replace(FLUX, quantized_parameters=FLUX.parameters // 4)
    assert words in " ".join(describe(configure(*settings), facts).table().split())


def test_where_factors_alone_are_published_no_packed_weights_are_counted(configure) -> None:  # type: ignore[no-untyped-def]
    numbers = describe(configure("publish.mode=lora"), FLUX)
    assert numbers.revision_bytes == 149_422_080
    assert "packed weights" not in numbers.table()
    assert "revision of 149 MB: LoRA factors 149 MB in float32 · samples" in " ".join(numbers.table().split())


def test_the_table_says_who_is_in_the_process_of_a_card(configure) -> None:  # type: ignore[no-untyped-def]
    worker = "num_gpus: 1, num_cpus: 2"
    fleet = (
        f"fleet={{placement: colocated, explorers: {{count: 3, {worker}}}, regenerators: {{count: 2, {worker}}}, "
        f"learners: {{{worker}}}}}"
    )
    numbers = describe(configure(fleet, "learner.world_size=2"), FLUX)
    text = " ".join(numbers.table().split())
    assert "1 explorer × 1 thread and 1 GPU, 2 learners × 1 thread and 1 GPU, which also run 2 explorers" in text
    assert "2 explorers and 2 regenerators · 6 CPUs and 3 GPUs reserved" in text
    assert "on each of 3 processes" in text
    assert numbers.packed_bytes == FLUX.packed_bytes
    alone = describe(configure(fleet.replace("count: 3", "count: 2"), "learner.world_size=2"), FLUX)
    assert alone.packed_bytes == 0  # each card makes its own
    assert "packed weights" not in alone.table()


def test_pruned_previews_are_counted_with_their_padding(configure) -> None:  # type: ignore[no-untyped-def]
    pruned = "rollout.preview.prune={after: 2, keep: 36}"
    numbers = describe(configure(pruned, "rollout.explore.micro_batch=24"), FLUX)
    assert (numbers.candidates, numbers.explore_units, numbers.dropped) == (4608, 48, 48 * 60)
    # 4 micro-batches × 2 steps, then 36 seeds in 2 micro-batches × 4 steps.
    assert numbers.explore_forwards == 48 * (4 * 2 + 2 * 4)
    assert numbers.padded_previews == 48 * 12
    explored = dict(numbers.rows())["explore"]
    assert all(words in explored for words in ("36 of 96 seeds", "2,880 previews", "576 are padding"))


@pytest.mark.parametrize(("rule", "said"), [("best_worst", "4 best and 4 worst"), ("random", "8 by an addressed draw")])
def test_the_plan_says_by_which_rule_seeds_are_chosen(rule: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert solrl("plan", "demo", "--set", f"rollout.selection={rule}") == 0
    assert f"8 of 24 seeds per prompt ({said})\n" in capsys.readouterr().out
