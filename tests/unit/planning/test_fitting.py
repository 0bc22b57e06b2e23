"""Whether a run fits a card, what the card decides, and what is said where it does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from solrl_ray.config import checks, compiled_learner, named
from solrl_ray.config.loading import load_with_sources
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError
from solrl_ray.planning import fitting
from solrl_ray.planning.arithmetic import Arithmetic, describe
from solrl_ray.planning.fitting import ACTIVATION_FILL, MAX_FILL, WARN_FILL, Gpu, fitting_changes
from solrl_ray.planning.gpu_memory import gpu_memories
from tests.unit.planning.test_gpu_memory import SPLIT, made_up, planned

LEAST = "learner={micro_batch: 1, activation_memory: 0, updates: 1}"  # 6.71 GB to explore, 6.19 GB if weights leave


def card(gigabytes: float) -> Gpu:
    """One of which so much may be filled."""
    return Gpu(name="a card", memory=gigabytes * 1e9 / MAX_FILL)


def peak(*settings: str) -> float:
    return gpu_memories(made_up(*settings))[0].peak / 1e9


def offloads(gigabytes: float, *settings: str) -> bool | None:
    """What `fleet.offload` means there; None: it does not fit."""
    found = fitting.fitted(made_up(*settings), card(gigabytes))
    return found.config.fleet.offload if found else None


def test_weights_leave_a_card_that_is_too_small_or_close_to_it() -> None:
    kept, left = peak(LEAST), peak(LEAST, "fleet.offload=true")
    assert left < WARN_FILL * kept
    assert offloads(kept / WARN_FILL + 0.01, LEAST) is False
    assert offloads(kept + 0.01, LEAST) is True  # it would fit, but estimates were up to 4 % too low
    assert offloads(kept - 0.01, LEAST) is True
    assert offloads(left - 0.01, LEAST) is None
    learns = peak()  # learning is the fullest stage, which no weights leave
    assert offloads(learns + 0.01) is False
    assert offloads(learns - 0.01) is None


@pytest.mark.parametrize(
    "settings",
    [
        (SPLIT,),
        ("rollout.explore.precision=bf16",),
        ("fleet={explorers: {num_gpus: 0}, regenerators: {num_gpus: 0}, learners: {num_gpus: 0}}",),
    ],
)
def test_where_no_weights_can_leave_nothing_is_open(settings: tuple[str, ...]) -> None:
    assert not fitting.is_open(made_up(*settings, "learner.activation_memory=0").config)
    arithmetic = made_up(*settings)
    assert fitting.fitted(arithmetic, card(1000)) is arithmetic
    with pytest.raises(UserError, match=r"fleet\.offload is true \(--set\); it must be false or null: "):
        checked(*settings, "learner.activation_memory=0", "fleet.offload=true")


def checked(*settings: str) -> None:
    parts = ("flux1_dev", "two_stage", "diffusion_nft", "clipscore", "one_gpu")
    given = ["prompts={train: t, heldout: h}", "rollout.explore.precision=fp8", *settings]
    loaded = load_with_sources(named.resolve([Path(part) for part in parts]), given)
    checks.check(loaded.config, loaded.sources)


def test_a_card_settles_what_is_open_and_else_says_how_to_try_it_anyway() -> None:
    arithmetic, kept = made_up(LEAST), peak(LEAST)
    assert fitting.is_open(arithmetic.config)
    for gigabytes, offload in ((2 * kept, False), (kept - 0.01, True)):
        settled = fitting.resolve_auto(arithmetic.config, arithmetic.facts, card(gigabytes))
        assert settled.fleet.offload is offload
        assert not fitting.is_open(settled)
    with pytest.raises(UserError) as planned_so:
        fitting.check(arithmetic, card(5))
    assert "fleet.offload=false" not in str(planned_so.value)
    with pytest.raises(UserError, match=r"--set fleet\.offload=false"):
        fitting.resolve_auto(arithmetic.config, arithmetic.facts, card(5))
    given = made_up(LEAST, "fleet.offload=false")
    assert not fitting.is_open(given.config)  # and is then not checked
    split = made_up(SPLIT, LEAST)
    assert fitting.resolve_auto(split.config, arithmetic.facts, card(5)) == split.config


def test_the_card_decides_which_activations_are_kept_where_that_is_open() -> None:
    opened, given = made_up("learner={micro_batch: 12, activation_memory: null}"), made_up(*ACTIVE)
    assert fitting.is_open(opened.config)
    assert compiled_learner.is_open(opened.config)
    least = {s: peak("learner.micro_batch=12", f"learner.activation_memory={s}") / ACTIVATION_FILL for s in (1, 0.5, 0)}
    assert least[1] > least[0.5] > least[0]

    def settled(arithmetic: Arithmetic, gigabytes: float) -> Config:
        return fitting.resolve_auto(arithmetic.config, arithmetic.facts, Gpu(name="a card", memory=gigabytes * 1e9))

    for gigabytes, share in ((least[1] + 0.01, 1), (least[1] - 0.01, 0.5), (least[0.5] - 0.01, 0)):
        found = settled(opened, gigabytes)
        assert found.learner.activation_memory == share
        assert not fitting.is_open(found)
    assert settled(given, least[1] + 0.01).learner.activation_memory == 1
    with pytest.raises(UserError, match=r"it fits with --set learner\.activation_memory=0\.5"):
        settled(given, 0.99 * least[1] * ACTIVATION_FILL / MAX_FILL)  # what is given is not changed


@pytest.mark.parametrize(
    ("busy_with", "gigabytes", "share", "micro_batch"),
    [
        (3, 30.0, 1, 12),  # 12, 6 and 3 samples take 18.9, 12.3 and 9 GB to learn, if all is kept
        (3, 16.0, 1, 6),
        (3, 9.1, 1, 3),
        (6, 16.0, 1, 6),
        (6, 9.5, 0.5, 6),  # three samples would leave the card idle
        (12, 16.0, 0.5, 12),
        (1000, 16.0, 0.5, 12),  # nothing keeps it busy
    ],
)
def test_micro_batches_become_smaller_only_while_they_keep_the_card_busy(
    busy_with: int, gigabytes: float, share: float, micro_batch: int
) -> None:
    opened = made_up("learner={micro_batch: 12, activation_memory: null}")
    facts = replace(opened.facts, stream_flops=int(fitting.MIN_STREAM_FLOPS / busy_with) + 1)
    card = Gpu(name="a card", memory=gigabytes * 1e9 / ACTIVATION_FILL)
    found = fitting.with_activation_memory(opened.config, facts, card).learner
    assert (found.activation_memory, found.micro_batch) == (share, micro_batch)


ACTIVE = ("learner.micro_batch=12", "learner.activation_memory=1")  # 18.9 GB to learn, 12.9 at 0.5 and 7 at 0
MANY = ("learner.micro_batch=96", "learner.activation_memory=0")  # 16.2 GB to learn, 11 with half of them
# 10.2 GB for explorer and regenerator of SPLIT, 9.8 with two images decoded at once, 9.6 with one
LEARNER_FIRST = {"learner.activation_memory": 0, "learner.micro_batch": 1}  # changed before, though these are others


@pytest.mark.parametrize(
    ("settings", "gigabytes", "changes"),
    [
        ((LEAST, "fleet.offload=false"), 6.6, {"fleet.offload": True}),
        (ACTIVE, 18.0, {"learner.activation_memory": 0.5}),
        (ACTIVE, 12.0, {"learner.activation_memory": 0}),
        ((*ACTIVE, "compile.learner=false"), 18.0, {"learner.activation_memory": 0}),  # an eager one has no half
        (MANY, 15.2, {"learner.micro_batch": 48}),
        ((*MANY, "learner.activation_memory=1"), 15.2, {"learner.activation_memory": 0, "learner.micro_batch": 48}),
        ((LEAST,), 6.18, {"model.decoding.micro_batch": 2}),
        ((LEAST, "fleet.offload=false"), 6.18, {"fleet.offload": True, "model.decoding.micro_batch": 2}),
        ((SPLIT,), 10.0, {**LEARNER_FIRST, "model.decoding.micro_batch": 2}),
        ((SPLIT,), 9.7, {**LEARNER_FIRST, "model.decoding.micro_batch": 1}),
        ((), 5.5, None),
    ],
)
def test_what_costs_least_is_changed_first_until_the_run_fits(
    settings: tuple[str, ...], gigabytes: float, changes: dict[str, object] | None
) -> None:
    assert fitting_changes(made_up(*settings), card(gigabytes)) == changes


def test_the_sentence_names_who_how_much_and_the_settings() -> None:
    with pytest.raises(UserError) as caught:
        fitting.check(made_up(*ACTIVE), card(15.0))
    said = str(caught.value)
    for words in ("explorer, regenerator and learner rank", "18.9 GB to learn", "15 GB", "15.8 GB"):
        assert words in said
    assert "--set learner.activation_memory=0.5 (12.9 GB)" in said


def test_text_encoders_that_do_not_fit_beside_a_model_are_said_to_belong_elsewhere() -> None:
    qwen = planned("qwen_image", "two_stage", "diffusion_nft", "pickscore", "one_gpu", "rollout.explore.precision=bf16")
    beside = gpu_memories(qwen)[0].processes[0].held / 1e9 + 2 * 8.292  # Qwen2.5-VL, 8.292 · 10⁹ parameters in bfloat16
    found = rf"{beside:.1f} GB to encode.*fleet\.placement split"
    with pytest.raises(UserError, match=found):
        fitting.check(qwen, card(82))
    apart = made_up(SPLIT, "fleet.encoders.num_gpus=1")
    large = describe(apart.config, replace(apart.facts, text_parameters=10**10))
    with pytest.raises(UserError, match=r"to encode.*fleet\.encoders\.num_gpus=0"):
        fitting.check(large, card(20))


def test_what_no_setting_makes_fit_is_said_with_the_least_that_is_needed() -> None:
    flux = planned("flux1_dev", "two_stage", "diffusion_nft", "pickscore", "one_gpu", "rollout.explore.precision=fp8")
    with pytest.raises(UserError, match=r"it fits with --set learner\.activation_memory=0 \("):
        fitting.check(flux, card(46))
    with pytest.raises(UserError, match=r"34\.8 GB to evaluate"):
        fitting.check(flux, card(33))


@pytest.mark.parametrize(("gigabytes", "advised"), [(8, True), (4, False)])
def test_a_card_for_each_worker_is_advised_only_where_none_of_them_alone_is_too_large(
    gigabytes: float, advised: bool
) -> None:
    with pytest.raises(UserError) as caught:
        fitting.check(made_up(SPLIT, LEAST), card(gigabytes))
    assert ("num_gpus: 1" in str(caught.value)) == advised


def test_a_plan_says_where_the_bytes_are_and_what_offloading_takes() -> None:
    arithmetic = made_up(LEAST)
    rows = dict(fitting.rows(arithmetic, Gpu(name="a card", memory=1e12, host_link=50e9)))
    assert list(rows) == ["GPU memory", "GPU peak", "offload", "store"]
    assert "learner rank 5.68 GB (transformer 2 GB, copy of layers with LoRA 400 MB, " in rows["GPU memory"]
    assert "6.71 GB (load 5.68 GB, explore 6.71 GB, regenerate 6.69 GB, " in rows["GPU peak"]
    # 800 MB come back over 50 GB/s.
    assert "6.19 GB (load 5.68 GB, explore 5.91 GB, regenerate 6.19 GB, " in rows["offload"]
    assert all(words in rows["offload"] for words in ("800 MB", "0.016 s", "50 GB/s"))
    assert fitting.seconds(made_up(LEAST, "fleet.offload=true"), 50e9) == pytest.approx(0.016)
    assert fitting.seconds(arithmetic, 50e9) == 0


@pytest.mark.parametrize(
    ("gigabytes", "settings", "said"),
    [
        (950, (), ("fleet.offload null becomes false", "peak 6.71 GB")),
        (6.6, (), ("fleet.offload null becomes true", "peak 6.19 GB")),
        (950, ("fleet.offload=false",), ("peak 6.71 GB",)),
    ],
)
def test_a_plan_says_that_the_run_fits_and_what_the_card_decided(
    gigabytes: float, settings: tuple[str, ...], said: tuple[str, ...]
) -> None:
    sentence = fitting.sentence(made_up(LEAST, *settings), card(gigabytes))
    assert f"{gigabytes:g} GB (95%) is usable" in sentence
    assert ("null becomes" in sentence) == (not settings)
    assert said[-1] in sentence


def test_a_plan_counts_samples_and_two_revisions_in_the_store() -> None:
    run = planned("sd35_large", "sol_rl_published", "pickscore", "kuberay", "rollout.explore.precision=fp8")
    assert run.packed_bytes == 0  # no layer with LoRA is quantised
    # 1.21 GB of samples, 2 × 0.189 of revisions
    store = dict(fitting.rows(run, card(150)))["store"]
    assert store == "1.59 GB in Ray's object store (/dev/shm: samples, two revisions)"


def of_videos(frames: int, *settings: str) -> Arithmetic:
    parts = ("wan21_1_3b", "two_stage", "diffusion_nft", "clipscore", "one_gpu", "rollout.explore.precision=fp8")
    sizes = (
        "rewards.0.frames={count: 4}",
        "model.resolution=[480, 832]",
        f"model.frames={frames}",
        "rollout={prompts: 1, pool: 24, keep: 2}",
    )
    return planned(*parts, *sizes, *settings)


# A latent frame is a token of 16 × 16 pixels, 30 × 52 of them; frames are 1 + 4 for each further latent frame.
@pytest.mark.parametrize(("frames", "tokens"), [(49, 13 * 30 * 52), (81, 21 * 30 * 52)])
def test_a_plan_of_videos_says_how_long_their_sequences_are(frames: int, tokens: int) -> None:
    rows = dict(of_videos(frames).rows())
    assert f" · 480 x 832 px, {frames} frames, {tokens:,} tokens per sample · " in rows["model"]
    assert rows["evaluate"].startswith("64 prompts × 4 samples × 28 steps = 256 videos")


def test_a_clip_that_is_too_long_for_a_card_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"fewer frames \(model\.frames is 401\) or a smaller model") as caught:
        fitting.check(of_videos(401), card(24))
    assert str(caught.value).count(". ") == 0


def test_a_plan_of_videos_counts_those_that_an_evaluation_shows() -> None:
    """Large enough that nothing else counts: 100 prompts with 4 videos of 49 frames, a byte a colour."""
    run = of_videos(49, "evaluation={prompts: 100, pictures: 100, samples: 4}")
    shown = 400 * 3 * 480 * 832 * 49
    store = dict(fitting.rows(run))["store"]
    assert store.startswith(f"{(shown + 2 * run.revision_bytes + run.latents_bytes) / 1e9:.1f} GB ")
    assert shown / 1e9 == pytest.approx(23.48, abs=0.01)


def test_the_largest_card_of_a_split_fleet_is_shown_with_each_of_its_processes() -> None:
    rows = dict(fitting.rows(made_up(SPLIT)))
    assert list(rows) == ["GPU memory", "GPU peak", "store"]
    assert "10.2 GB (explorer: load 4.25 GB, " in rows["GPU peak"]
    assert "; regenerator: load 4.95 GB, regenerate 5.46 GB, " in rows["GPU peak"]


def test_a_changed_run_keeps_its_numbers_of_prompts() -> None:
    arithmetic = made_up(LEAST)
    counted = describe(arithmetic.config, arithmetic.facts, train_prompts=480, heldout_prompts=64)
    made = fitting.check(counted, card(6.6))
    assert (made.train_prompts, made.heldout_prompts) == (480, 64)


def test_of_a_model_whose_memory_nobody_measured_no_size_is_said_and_no_activations_are_kept() -> None:
    parts = ("flux1_dev", "two_stage", "diffusion_nft", "clipscore", "one_gpu", "rollout.explore.precision=fp8")
    is_open = ("model.family=chroma", "learner={micro_batch: 6, activation_memory: null}")
    assert planned(*parts).facts.memory_is_known
    unknown, small = planned(*parts, *is_open), Gpu(name="a card", memory=1e9)
    assert not unknown.facts.memory_is_known
    assert gpu_memories(unknown) == ()
    settled = fitting.resolve_auto(unknown.config, unknown.facts, small).learner
    assert (settled.activation_memory, settled.micro_batch) == (0, 6)
    said = [("memory", "unknown: nobody has measured models of family 'chroma'")]
    assert fitting.rows(unknown, small) == fitting.rows(unknown) == said
    on_cpus = "fleet={explorers: {num_gpus: 0}, regenerators: {num_gpus: 0}, learners: {num_gpus: 0}}"
    assert fitting.rows(planned(*parts, *is_open, on_cpus)) == []
