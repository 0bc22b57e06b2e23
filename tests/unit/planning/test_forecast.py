"""What a plan says about time: stage seconds, against sums done by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from solrl_ray.config.loading import load, read_file
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError
from solrl_ray.planning.arithmetic import ModelFacts, describe
from solrl_ray.planning.compiling import compiled
from solrl_ray.planning.forecast import Forecast, _spent, forecast
from solrl_ray.planning.iteration import Orchestration
from solrl_ray.planning.prices import (
    ON_ITS_CARD,
    SHIPPED,
    TOUCHED,
    Cluster,
    Figure,
    Priced,
    Unpriced,
    cluster_of,
    orchestration,
    price_list,
    priced,
)

CONFIGS = Path(__file__).parents[3] / "configs"
SD35 = ModelFacts(
    latent_shape=(16, 128, 128),
    parameters=8_060_000_000,
    lora_modules=300,
    lora_parameters=47_200_000,
    packed_bytes=0,
    quantized_parameters=1_798_000_000,
)
MEDIUM = ModelFacts(
    latent_shape=(16, 64, 64),
    parameters=2_240_000_000,
    lora_modules=1,
    lora_parameters=1,
    packed_bytes=0,
    quantized_parameters=452_000_000,
)
INPUTS = ("prompts={train: train.txt, heldout: heldout.txt}", "rewards=[{kind: clipscore, path: some/clip}]")
UNPRUNED = "rollout.preview.prune=null"
"""As in the runs that prices were measured and solved from."""
FREE = Orchestration(conditions="none")


def colocated(samplers: int) -> str:
    one = "num_gpus: 1"
    pools = f"explorers: {{count: {samplers}, {one}}}, regenerators: {{count: {samplers}, {one}}}"
    return f"fleet={{placement: colocated, {pools}, learners: {{{one}}}}}"


def configure(*overrides: str, model: str = "sd35_large") -> Config:
    files = [CONFIGS / "methods/sol_rl_published.yaml", CONFIGS / f"models/{model}.yaml"]
    return load(files, (*INPUTS, "rollout.explore.precision=auto", UNPRUNED, *overrides))


def told(config: Config, gpu: str, **cluster: float) -> Forecast:
    arithmetic, there = describe(config, SD35), Cluster(gpu=gpu, **cluster)  # type: ignore[arg-type]
    return forecast(arithmetic, price_list(gpu), there, FREE)


def stages_of(config: Config, gpu: str, facts: ModelFacts = SD35) -> Priced:
    return priced(describe(config, facts), price_list(gpu), Cluster(gpu=gpu))


def test_a_step_has_the_price_of_the_nearest_listed_share_of_quantised_weights() -> None:
    def step(share: float) -> Figure:
        facts = replace(SD35, quantized_parameters=round(share * SD35.parameters))
        return stages_of(configure(), "h200", facts).figures["pool step (fp8)"]

    listed, all_blocks, between, less = step(0.223), step(0.66), step(0.5), step(0.1115)
    assert (listed.ms, listed.measured) == (57.5, True)
    assert (all_blocks.ms, all_blocks.measured) == (45.4, True)
    assert (between.ms, between.measured) == (45.4, False)  # 66 % is nearer to 50 % than 22 % is
    assert (less.ms, less.measured) == (57.5, False)
    assert step(1.0).ms == 45.4  # nobody measured more
    assert between.source.endswith("; with 66% quantised weights, the run has 50%")


def test_another_reward_than_clipscore_is_counted_as_clipscore_and_said_to_be_estimated() -> None:
    def figure(*rewards: str) -> Figure:
        given = ", ".join(f"{{kind: {kind}, path: some/folder}}" for kind in rewards)
        return stages_of(configure(f"rewards=[{given}]"), "h200").figures["decode and reward"]

    assert (figure("clipscore").ms, figure("clipscore").measured) == (40.6, True)
    mixed = figure("clipscore", "pickscore", "hpsv2")
    assert (mixed.ms, mixed.measured) == (40.6, False)
    assert mixed.source.startswith("pickscore, hpsv2 counted as CLIPScore; rollout_sd3_all_blocks.json: its VAE")
    slow = figure("pickscore", "hpsv3", "unifiedreward")
    assert slow.ms == pytest.approx(40.6 + 28 + 100)
    assert "hpsv3 estimated at 28 ms; unifiedreward estimated at 100 ms" in slow.source


def test_a_small_micro_batch_takes_as_long_as_the_cpu_that_starts_its_kernels() -> None:
    def update(micro_batch: int, streams: int, kept: float = 1) -> float:
        one = f"learner={{world_size: 8, activation_memory: {kept}, micro_batch: {micro_batch}}}"
        return stages_of(configure(one, "compile.learner=true"), "h200", replace(SD35, streams=streams)).stages.update

    traffic = 1152 * 16 * 128 * 128 * 4 / 2e9
    # 144 micro-batches a rank, each at 6 timesteps: two of 1.2 ms a stream, and one with a backward pass of two
    assert update(1, 76) == pytest.approx(144 * 6 * 76 * 5 * 0.0012 + traffic)
    assert update(1, 76, kept=0) == pytest.approx(144 * 6 * 76 * 6 * 0.0012 + traffic)  # one more is computed again
    assert update(4, 76) == update(4, 0)


def test_stage_seconds_are_images_times_steps_times_the_figures() -> None:
    stages = stages_of(configure("learner.world_size=8", "learner.activation_memory=1"), "h200").stages
    assert stages.explore == pytest.approx(24 * (6 * 0.0575 + 0.0406))
    assert stages.regenerate == pytest.approx(24 * (10 * 0.0631 + 0.0406))
    # 36 micro-batches of 4 a rank, each at 6 timesteps: one backward, two forwards (reference and old policy). Then
    # 1152 samples of 16 × 128 × 128 floats at 2 GB/s; one node, so no gradient travels.
    traffic = 1152 * 16 * 128 * 128 * 4 / 2e9
    assert stages.update == pytest.approx(36 * 6 * 4 * (0.276 + 2 * 0.1036) + traffic)
    for kept, backward in ((1, 0.160), (0.75, 0.176), (0.5, 0.192), (0, 0.210)):
        compiled = configure("learner.world_size=8", "compile.learner=true", f"learner.activation_memory={kept}")
        update = stages_of(compiled, "h200").stages.update
        assert update == pytest.approx(36 * 6 * 4 * (backward + 2 * 0.0626) + traffic)


def test_guidance_doubles_steps_and_a_guided_objective_has_forwards_of_the_negative_prompt() -> None:
    sizes = ("learner.world_size=8", "learner.activation_memory=1", "model.cfg.scale=4.5")
    guided = stages_of(configure(*sizes), "h200")
    assert guided.stages.explore == pytest.approx(24 * (6 * 2 * 0.0575 + 0.0406))
    assert guided.stages.regenerate == pytest.approx(24 * (10 * 2 * 0.0631 + 0.0406))
    assert not guided.figures["pool step (fp8)"].measured
    flow = ("objective={kind: flow_grpo, kl: 0.01}", "rollout.sampler={kind: flow_sde}")
    plain, with_it = (stages_of(configure(*sizes[:count], *flow), "h200").stages.update for count in (2, 3))
    # Each of 36 × 9 passes of 4 samples: v_theta and v_reference have a forward of the negative prompt.
    assert with_it - plain == pytest.approx(36 * 9 * 4 * 2 * 0.1036)


def test_the_seconds_that_the_prices_of_a_b200_were_solved_from_come_out_again() -> None:
    # SD3.5-Large, eight cards that take turns: 126 s exploring, 63 s regenerating, 240 s training (arXiv 2604.06916).
    # The price list is solved from these: that the way back is right is all that this shows, and nothing of a B200.
    plan = told(configure(colocated(8), "learner.world_size=8"), "b200")
    assert plan.gpus == 8
    assert plan.seconds == pytest.approx(126 + 63 + 240, rel=0.05)
    assert max(plan.parts, key=lambda name: plan.parts[name]) == "learn"
    assert plan.choosing == pytest.approx(126 / (126 + 63 + 240), rel=0.05)
    step = dict(plan.rows())["a step"]
    assert f"{8 * plan.seconds:,.0f} GPU-seconds" in step
    assert "48 × 24 samples" in step
    assert sum(plan.parts.values()) == pytest.approx(plan.seconds)
    assert plan.gpu_hours(100) == pytest.approx(8 * plan.seconds * 100 / 3600)


def test_exploring_ahead_hides_the_shorter_of_exploring_and_the_rest() -> None:
    pools = "fleet={explorers: {count: 8}, regenerators: {count: 8}}"
    present = told(configure(pools, "learner.world_size=16"), "h200")
    ahead = told(configure(pools, "learner.world_size=16", "rollout.max_staleness=1"), "h200")
    # All that was waited for but the longer of exploring and the other two, which begin when the revision is there.
    stages = present.priced.stages
    exploring, regenerating = 48 * 4 / 8 * stages.explore, 48 / 8 * stages.regenerate
    begun = min(40 / 48 * stages.early, 5 * stages.regenerate)  # of the update, before the last round of 8 samples
    others = stages.publication + stages.load + regenerating + stages.update - begun
    assert ahead.seconds == pytest.approx(max(exploring, others), rel=0.02)
    assert ahead.seconds < 0.9 * present.seconds
    assert sum(ahead.parts.values()) == pytest.approx(ahead.seconds)


def test_a_model_that_differs_a_little_is_the_listed_one_and_another_has_no_prices() -> None:
    less = replace(SD35, parameters=7_750_000_000)
    measured = stages_of(configure(), "h200").figures
    assert stages_of(configure("model.resolution=1040"), "h200", less).figures == measured
    with pytest.raises(Unpriced, match=r"has no sd3 at 1056 px with 8\.1 B parameters"):  # 6 % more pixels
        stages_of(configure("model.resolution=1056"), "h200")
    with pytest.raises(Unpriced, match=r"it has sd3 at 1024 px \(8\.1 B parameters\)$"):
        stages_of(configure(), "h200", replace(SD35, parameters=7_650_000_000))


def test_a_model_without_prices_has_no_forecast() -> None:
    arithmetic = describe(configure("model.resolution=512"), SD35)
    with pytest.raises(Unpriced, match="the price list of NVIDIA H200 has no sd3"):
        forecast(arithmetic, price_list("h200"), Cluster(gpu="h200"), FREE)


def test_a_model_that_sees_a_reference_costs_as_much_more_as_it_has_tokens() -> None:
    steps = {model.family: model.steps["bf16"] for model in price_list("h200").models}
    # The picture's and the reference's 1,024 tokens, and 128 of the text.
    assert steps["flux_kontext"].ms == pytest.approx(steps["flux"].ms * (2 * 1024 + 128) / (1024 + 128))
    assert not steps["flux_kontext"].measured


@pytest.mark.parametrize(
    ("ms", "words"), [(0.05, "0.05 ms"), (999.4, "999 ms"), (999.7, "1 s"), (1234, "1.23 s"), (1_234_000, "1230 s")]
)
def test_a_figure_is_told_in_seconds_once_it_is_rounded_to_one(ms: float, words: str) -> None:
    assert Figure(ms=ms, measured=True, source="here").time == words


def test_the_table_tells_measured_figures_from_estimates() -> None:
    config = configure("fleet.explorers.count=6", "learner.world_size=8")
    rows = forecast(describe(config, SD35), price_list("h200"), Cluster(gpu="h200"), FREE).rows()
    text = " ".join(f"{name} {words}" for name, words in rows)
    measured, estimates = text.split("ESTIMATED")
    taken = measured.split("measured")[1]
    assert "pool step (fp8) 57.5 ms; regeneration step (bf16) 63.1 ms; decode and reward 40.6 ms" in taken
    assert "making a revision 1.67 s (assumed" in estimates
    assert re.search(r"time \d+(\.\d+)? (s|min) an iteration on 15 × NVIDIA H200", measured)
    assert "e+" not in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.662, "0.662 s"),
        (99.4, "99.4 s"),
        (100.2, "1.67 min"),
        (559.6, "9.33 min"),
        (1652, "27.5 min"),
        (9000, "2.5 h"),
    ],
)
def test_seconds_of_an_iteration_are_told_in_minutes_once_there_are_many(seconds: float, words: str) -> None:
    assert _spent(seconds) == words


def test_shapes_are_priced_by_the_mean_of_their_pixels() -> None:
    square = stages_of(configure(), "h200").figures
    assert stages_of(configure("model.resolution=[512, 2048]"), "h200").figures == square
    assert stages_of(configure("model.resolution=[[1024, 512], [1024, 1536]]"), "h200").figures == square


def test_a_plan_counts_what_is_compiled_for_each_shape() -> None:
    two = "model.resolution=[[1024, 1024], [768, 1344]]"
    gpus = "fleet={explorers: {num_gpus: 1}, regenerators: {num_gpus: 1}, learners: {num_gpus: 1}}"
    # An explorer's forward; a regenerator's for samples and for evaluations; passes of v_reference, v_old and v_theta.
    assert counts(configure(gpus)) == {"forwards": 3, "decoders": 2, "kinds": 3, "s": 22 + 70}
    eager = "compile.decoder=false"
    assert counts(configure(gpus, eager)) == {"forwards": 3, "kinds": 3, "s": 66}
    assert counts(configure(gpus, two)) == {"forwards": 6, "decoders": 4, "kinds": 6, "shapes": 2, "s": 184}
    # Roles of a card have one decoder.
    assert counts(configure(colocated(1), two))["s"] == 6 * 11 + 2 * 70 + 6 * 22
    assert dict(told(configure(gpus, two), "h200").rows())["compiling"] == compiled(configure(gpus, two))
    assert compiled(configure(two)) == ""  # CPUs compile nothing


def counts(config: Config) -> dict[str, int]:
    """What a plan says is compiled: noun → number, and the seconds."""
    return {noun: int(number) for number, noun in re.findall(r"(\d+) (\w+)", compiled(config))}


def test_a_revision_travels_to_explorers_without_a_learner_in_their_process() -> None:
    def load(*fleet: str) -> float:
        there = Cluster(gpu="h200", gigabytes_per_second=1.0)
        return priced(describe(configure(*fleet), SD35), price_list("h200"), there).stages.load

    factors, alone = 4 * 47.2e6 / 1e9, 0.355  # in float32; the price of loading
    assert load("fleet={explorers: {count: 64}, regenerators: {count: 8}}") == pytest.approx(alone + factors)
    assert load(colocated(1)) == pytest.approx(alone)


def test_what_was_scaled_by_data_sheets_says_so_where_its_time_stands() -> None:
    config = configure("rollout.explore.precision=bf16", colocated(1))
    for gpu, said in (("h200", False), ("h100-80", False), ("a100-80", True)):
        rows = dict(told(config, gpu).rows())
        assert [("from the data sheet" in rows[name]) for name in ("time", "total time")] == [said, said]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["rollout.explore.precision=nvfp4"],
            "rollout.explore.precision is 'nvfp4', for which the price list of",
        ),
        (["model.resolution=64"], "the price list of NVIDIA H200 has no sd3 at 64 px"),
        (["model.family=flux2_klein"], "the price list of NVIDIA H200 has no flux2_klein at 1024 px"),
    ],
)
def test_what_no_figure_stands_for_is_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(Unpriced) as refused:
        stages_of(configure(*overrides), "h200")
    assert str(refused.value).startswith(problem)


def test_a_cluster_is_a_file_whose_card_an_option_replaces(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("gpu: h200\ngpus_per_node: 4\n")
    assert cluster_of(file, None) == Cluster(gpu="h200", gpus_per_node=4)
    assert cluster_of(file, "b200") == Cluster(gpu="b200", gpus_per_node=4)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("gpu: h200\nnodes: 4\n", "nodes"),
        ("gpus_per_node: 4\n", "gpu"),
        ("gpu: h200\ngpus_per_node: many\n", "gpus_per_node"),
    ],
)
def test_a_mistake_in_a_clusters_file_is_named_with_the_keys_that_there_are(
    text: str, named: str, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"cluster\.yaml: {named}: .* gpu, gpus_per_node, "):
        cluster_of(file, None)
    file.write_text("h200\n")
    with pytest.raises(UserError, match=r"cluster\.yaml"):
        cluster_of(file, None)


def test_a_card_that_is_not_known_is_named_with_those_that_are() -> None:
    with pytest.raises(UserError, match=r"'h300'.*a100-80, a6000, b200, h100-80, h20, h200, l4, l40s"):
        price_list("h300")


def test_the_shipped_costs_of_the_controller_are_there() -> None:
    milliseconds = read_file(SHIPPED / "controller.yaml")
    assert orchestration().model_dump() == milliseconds


def test_a_pruned_pool_costs_its_padded_slots_and_a_second_scoring() -> None:
    whole = stages_of(configure(), "h200").stages.explore  # a unit of 24
    assert whole == pytest.approx(24 * (6 * 57.5 + 40.6) / 1000)
    pruned = configure("rollout.preview.prune={after: 2, keep: 36}", "rollout.explore.micro_batch=24")
    slots = 96 * 2 + 48 * 4
    assert stages_of(pruned, "h200").stages.explore == pytest.approx((slots * 57.5 + (96 + 48) * 40.6) / 1000)
    twelve = configure("rollout.preview.prune={after: 2, keep: 36}", "rollout.explore.micro_batch=12")
    slots = 96 * 2 + 36 * 4
    seconds = stages_of(twelve, "h200").stages.explore
    assert seconds == pytest.approx((slots * 57.5 + (96 + 36) * 40.6) / 1000)
    assert 0.5 < seconds / (4 * whole) < 0.7
    assert told(twelve, "h200").parts["explore"] < 0.75 * told(configure(), "h200").parts["explore"]


def test_a_card_does_one_thing_after_the_other_and_makes_its_own_revision() -> None:
    plan = told(configure(colocated(1)), "h200")
    stages = plan.priced.stages
    assert stages.publication == 0
    work = 48 * (4 * stages.explore + stages.regenerate) + stages.update
    assert plan.seconds == pytest.approx(work + stages.merge)
    assert plan.parts["publish"] == pytest.approx(stages.merge)
    figure = plan.priced.figures["revision in a learner's process"]
    assert not figure.measured
    assert "making a revision" not in plan.priced.figures


def test_what_a_card_makes_of_a_revision_is_by_what_lora_touches_unless_the_list_has_it() -> None:
    config, prices = configure(colocated(1)), price_list("h200")
    for touched, seconds in ((TOUCHED, ON_ITS_CARD), (TOUCHED / 4, ON_ITS_CARD / 4)):
        facts = replace(SD35, touched_parameters=int(touched))
        assert stages_of(config, "h200", facts).stages.merge == pytest.approx(seconds)
    listed = Figure(ms=250, measured=True, source="here")
    models = tuple(model.model_copy(update={"merge": listed}) for model in prices.models)
    known = prices.model_copy(update={"models": models})
    made = priced(describe(config, SD35), known, Cluster(gpu="h200"))
    assert made.stages.merge == 0.25
    assert made.figures["revision in a learner's process"] == listed


def test_explorers_without_a_learner_need_packed_revisions() -> None:
    alone, beside = (told(configure(colocated(n)), "h200") for n in (1, 2))
    assert beside.priced.stages.publication == pytest.approx(1.67)
    assert beside.priced.figures.keys() - alone.priced.figures.keys() == {"making a revision", "loading it on a worker"}


def test_frozen_weights_that_come_back_take_time_of_an_iteration() -> None:
    kept, moved = (told(configure(colocated(1), f"fleet.offload={way}"), "h200") for way in ("false", "true"))
    moving = moved.parts["frozen weights"]
    # SD3.5-Large's 1.798e9 quantised weights in BF16, none of which LoRA touches, once at 50 GB/s.
    assert moving == pytest.approx(2 * 1.798e9 / 50e9)
    assert moved.seconds == pytest.approx(kept.seconds + moving)
    # All is explored before anything is regenerated, on the same card.
    assert moved.parts["explore"] < kept.parts["explore"]
    together = [plan.parts["explore"] + plan.parts["regenerate after exploring"] for plan in (kept, moved)]
    assert together[1] == pytest.approx(together[0])
