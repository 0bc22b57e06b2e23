"""Whether a run fits a card, what `fleet.sharing: auto` means there, and what is said where it does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from solrl_ray.config import checks, compiled_learner, fitting
from solrl_ray.config.arithmetic import Arithmetic, size_in_words
from solrl_ray.config.card_memory import cards
from solrl_ray.config.fitting import FILLED, ROOMY, Card, TooSmall, fitting_changes, sharing_on
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import can_be_packed
from solrl_ray.errors import UserError
from tests.unit.config.test_card_memory import made_up, planned


def card(gigabytes: float) -> Card:
    """One of which so much may be filled."""
    return Card(name="a card", memory=gigabytes * 1e9 / FILLED)


def test_auto_is_the_first_way_that_fits_from_keeping_weights_to_one_stage_at_a_time() -> None:
    (found,) = cards(made_up())
    keep, lay_down, one_at_a_time = (found.peak(way) / 1e9 for way in ("keep", "lay_down", "one_at_a_time"))
    assert sharing_on(made_up(), card(keep + 0.01)) == "keep"
    assert sharing_on(made_up(), card(keep - 0.01)) == "lay_down"
    assert sharing_on(made_up(), card(lay_down - 0.01)) == "one_at_a_time"
    assert sharing_on(made_up(), card(one_at_a_time - 0.01)) is None
    assert sharing_on(made_up("fleet.sharing=keep"), card(keep - 0.01)) is None
    assert sharing_on(made_up("fleet.sharing=lay_down"), card(lay_down - 0.01)) is None
    assert sharing_on(made_up("fleet.sharing=lay_down"), card(keep + 0.01)) == "lay_down"


def test_auto_is_settled_by_the_card_and_graphs_keep_their_addresses() -> None:
    arithmetic = made_up()
    keep, lay_down = (cards(arithmetic)[0].peak(way) / 1e9 for way in ("keep", "lay_down"))
    assert fitting.is_open(arithmetic.config)
    for gigabytes, way in ((keep + 0.01, "keep"), (keep - 0.01, "lay_down"), (lay_down - 0.01, "one_at_a_time")):
        settled = fitting.settled(arithmetic.config, arithmetic.facts, card(gigabytes))
        assert settled.fleet.sharing == way
        assert not fitting.is_open(settled)
    graphs = made_up("compile.cudagraphs=true")
    assert fitting.settled(graphs.config, graphs.facts, card(keep + 0.01)).fleet.sharing == "keep"
    with pytest.raises(
        UserError, match=r"with fleet\.sharing keep.*, or --set fleet\.sharing=keep to try it anyway\.$"
    ):
        fitting.settled(graphs.config, graphs.facts, card(keep - 0.01))
    assert not fitting.is_open(made_up("fleet.learners.num_gpus=0", "compile.learner=false").config)


def test_the_card_decides_which_activations_are_kept_where_that_is_open() -> None:
    opened, given = made_up("learner={micro_batch: 12, activation_memory: null}"), made_up(*ACTIVE)
    assert fitting.is_open(opened.config)
    assert compiled_learner.is_open(opened.config)
    kept = {share: made_up("learner.micro_batch=12", f"learner.activation_memory={share}") for share in (1, 0.5, 0)}
    least = {share: cards(arithmetic)[0].peak("one_at_a_time") / ROOMY / 1e9 for share, arithmetic in kept.items()}
    assert least[1] > least[0.5] > least[0]

    def settled(arithmetic: Arithmetic, gigabytes: float) -> Config:
        assert arithmetic.facts is not None
        return fitting.settled(arithmetic.config, arithmetic.facts, Card(name="a card", memory=gigabytes * 1e9))

    for gigabytes, share in ((least[1] + 0.01, 1), (least[1] - 0.01, 0.5), (least[0.5] - 0.01, 0)):
        found = settled(opened, gigabytes)
        assert found.learner.activation_memory == share
        assert not fitting.is_open(found)
    assert settled(given, least[1] + 0.01).learner.activation_memory == 1
    with pytest.raises(UserError, match=r"it fits with --set learner\.activation_memory=0\.5"):
        settled(given, 0.99 * least[1] * ROOMY / FILLED)  # what is given is not changed


@pytest.mark.parametrize(
    ("busy_with", "gigabytes", "share", "micro_batch"),
    [
        (3, 30.0, 1, 12),  # 12, 6 and 3 samples take 16.7, 10.1 and 6.8 GB to learn, if all is kept
        (3, 16.0, 1, 6),
        (3, 9.0, 1, 3),
        (6, 16.0, 1, 6),
        (6, 9.0, 0.5, 6),  # three samples would leave the card idle
        (12, 16.0, 0.5, 12),
        (1000, 16.0, 0.5, 12),  # nothing keeps it busy
    ],
)
def test_micro_batches_become_smaller_only_while_they_keep_the_card_busy(
    busy_with: int, gigabytes: float, share: float, micro_batch: int
) -> None:
    opened = made_up("learner={micro_batch: 12, activation_memory: null}")
    assert opened.facts is not None
    facts = replace(opened.facts, block_flops=int(fitting.BUSY / busy_with) + 1)
    card = Card(name="a card", memory=gigabytes * 1e9 / ROOMY)
    found = fitting.with_activation_memory(opened.config, facts, card).learner
    assert (found.activation_memory, found.micro_batch) == (share, micro_batch)


ACTIVE = ("learner.micro_batch=12", "learner.activation_memory=1")  # 17.9 GB to learn, 12 at 0.5 and 6 at 0
MANY = ("learner.micro_batch=96", "learner.activation_memory=0")  # 15.3 GB to learn, 10 with half of them
PACK = "publish.base=pack"  # 7.47 GB to regenerate, 7.25 with two images decoded at once, 7.14 with one
# 13.51 GB to explore and regenerate, 13.07 with two images decoded at once, 12.85 with one
GRAPHS = (
    "compile.cudagraphs=true",
    "fleet.sharing=keep",
    PACK,
    "learner={micro_batch: 1, activation_memory: 0, updates: 1}",
)


@pytest.mark.parametrize(
    ("settings", "gigabytes", "changes"),
    [
        (("fleet.sharing=keep",), 14.2, {"fleet.sharing": "lay_down"}),
        (("fleet.sharing=keep",), 11.9, {"fleet.sharing": "one_at_a_time"}),
        (("fleet.sharing=lay_down",), 11.9, {"fleet.sharing": "one_at_a_time"}),
        (("fleet.sharing=keep", PACK), 7.4, {"fleet.sharing": "one_at_a_time", "model.decoding.micro_batch": 2}),
        (ACTIVE, 17.9, {"learner.activation_memory": 0.5}),
        (ACTIVE, 11.9, {"learner.activation_memory": 0}),
        ((*ACTIVE, "compile.learner=false"), 17.9, {"learner.activation_memory": 0}),  # an eager one has no half
        (MANY, 15.2, {"learner.micro_batch": 48}),
        ((*MANY, "learner.activation_memory=1"), 15.2, {"learner.activation_memory": 0, "learner.micro_batch": 48}),
        ((PACK,), 7.4, {"model.decoding.micro_batch": 2}),
        ((PACK,), 7.2, {"model.decoding.micro_batch": 1}),
        ((PACK,), 7.12, {"model.decoding.micro_batch": 1, "rollout.regenerate.micro_batch": 3}),
        (GRAPHS, 13.4, {"model.decoding.micro_batch": 2}),
        (GRAPHS, 12.82, {"model.decoding.micro_batch": 1, "rollout.explore.micro_batch": 4}),
        (("model.decoding.micro_batch=1",), 7.2, {"publish.base": "pack"}),  # 7.26 GB to load
        ((), 7.2, {"publish.base": "pack", "model.decoding.micro_batch": 1}),
        ((), 6.2, None),
    ],
)
def test_what_costs_least_is_tried_first_and_no_more_than_needed(
    settings: tuple[str, ...], gigabytes: float, changes: dict[str, object] | None
) -> None:
    assert fitting_changes(made_up(*settings), card(gigabytes)) == changes


def test_the_sentence_names_who_how_much_and_the_settings() -> None:
    arithmetic = made_up("learner.micro_batch=12", "learner.activation_memory=1")
    with pytest.raises(UserError) as caught:
        fitting.check(arithmetic, card(15.0))
    assert str(caught.value) == (
        "explorer, regenerator and learner rank on one a card need 17.9 GB to learn (estimated, with fleet.sharing "
        "one_at_a_time), and 15 GB of its 15.8 GB may be filled; it fits with --set learner.activation_memory=0.5 "
        "(12 GB)."
    )


def test_a_run_that_is_refused_at_its_start_is_told_how_to_try_it_anyway() -> None:
    arithmetic = made_up()
    with pytest.raises(UserError) as planned_so:
        fitting.check(arithmetic, card(6.2))
    assert "fleet.sharing=keep" not in str(planned_so.value)
    with pytest.raises(UserError, match=r"\(num_gpus: 1\), or --set fleet\.sharing=keep to try it anyway\.$"):
        fitting.settled(arithmetic.config, arithmetic.facts, card(6.2))
    assert not fitting.is_open(made_up("fleet.sharing=keep").config)  # and is then not checked


def test_what_no_batch_makes_fit_is_said_to_need_another_card() -> None:
    flux = planned("flux1_dev", "two_stage", "diffusion_nft", "pickscore", "one_gpu", "rollout.explore.precision=fp8")
    with pytest.raises(UserError, match=r"it fits with --set learner\.activation_memory=0 \("):
        fitting.check(flux, card(46))
    tried = r"with micro-batches of 1, learner\.activation_memory 0 and publish\.base pack it is still 36\.3 GB "
    said = tried + r"to regenerate: take a card with more memory, a smaller model, or"
    with pytest.raises(TooSmall, match=said):
        fitting.check(flux, card(36.25))


def test_a_sharing_that_was_tried_besides_is_named() -> None:
    tried = r"learner\.activation_memory 0, publish\.base pack and fleet\.sharing one_at_a_time it is still "
    with pytest.raises(TooSmall, match=tried + r"[67]\.\d+ GB to \w+: take"):
        fitting.check(made_up("fleet.sharing=keep"), card(6.2))


def test_z_image_does_not_fit_24_gb_with_a_base_pack_either_but_only_just() -> None:
    parts = ("z_image", "two_stage", "diffusion_nft", "pickscore", "one_gpu_24gb", "rollout.explore.precision=fp8")
    rtx4090 = Card(name="NVIDIA RTX 4090", memory=25.8e9)
    said = r"need 26 GB to load .* and publish\.base pack it is still 25\.2 GB to regenerate: take a card with more"
    with pytest.raises(UserError, match=said):
        fitting.check(planned(*parts, "learner.activation_memory=0"), rtx4090)
    packed = planned(*parts, "learner.activation_memory=0", "publish.base=pack")
    assert fitting.check(packed, replace(rtx4090, memory=26.9e9)) == "one_at_a_time"


NOT_PACKED = {
    "merges": ("publish.mode=lora",),
    "full precision": ("rollout.explore.precision=bf16",),
    "one stage": ("rollout.strategy=scaled", "rollout.preview.prune=null", "rollout.regenerate.micro_batch=24"),
    "a level in full precision": ("fidelity={floor: 0.5, fallback: [{precision: bf16}]}",),
}


@pytest.mark.parametrize("settings", NOT_PACKED.values(), ids=NOT_PACKED)
def test_a_base_pack_is_proposed_only_where_the_configuration_is_then_accepted(settings: tuple[str, ...]) -> None:
    assert can_be_packed(made_up().config)
    checks.check(made_up(PACK).config)
    without = made_up(*settings)
    checks.check(without.config)
    assert not can_be_packed(without.config)
    with pytest.raises(UserError, match="pack"):
        checks.check(made_up(*settings, PACK).config)
    for gigabytes in (7.2, 9.2, 11.2, 13.2):
        assert "publish.base" not in (fitting_changes(without, card(gigabytes)) or {})


def test_a_base_pack_is_not_proposed_if_the_card_quantises_nothing() -> None:
    unknown = made_up("rollout.explore.precision=auto", "model.decoding.micro_batch=1")
    assert unknown.facts is not None
    plain = replace(unknown, facts=replace(unknown.facts, quantized_parameters=0))  # auto is bf16 on this card
    assert fitting_changes(unknown, card(7.2)) == {"publish.base": "pack"}
    assert "publish.base" not in (fitting_changes(plain, card(7.1)) or {})


def test_a_card_for_each_worker_is_not_advised_where_one_worker_alone_is_too_large() -> None:
    flux = planned("flux1_dev", "two_stage", "diffusion_nft", "pickscore", "one_gpu_80gb")
    # Regenerator: transformer 23.8 GB, base of what LoRA touches 3.59, decoder 0.168, rewards 3.94, context 0.74 are
    # 32 GB; a forward of the four images of an evaluation is the least that it takes besides.
    with pytest.raises(UserError, match=r"and 33\.2 GB for a regenerator alone: take a card with more memory or a sm"):
        fitting.check(flux, card(24))
    with pytest.raises(UserError, match=r"or a card for each worker \(num_gpus: 1\)\.$"):
        fitting.check(flux, card(36.25))


def test_a_plan_says_where_the_bytes_are_and_what_laying_down_takes() -> None:
    arithmetic = made_up()
    rows = dict(fitting.rows(arithmetic, Card(name="a card", memory=1e12, host_link=50e9)))
    (found,) = cards(arithmetic)
    assert list(rows) == ["GPU memory", "GPU peak", "lay_down"]
    held = "explorer 4.25 GB (transformer 1.5 GB, base of what LoRA touches 200 MB, decoder 100 MB, "
    assert rows["GPU memory"].startswith(f"what workers hold on one GPU between their turns, estimated: {held}")
    assert rows["GPU peak"].startswith("the most that one GPU holds in a turn, estimated, by fleet.sharing: keep ")
    assert "lay_down 12 GB (load 12 GB, explore and regenerate 11.5 GB, " in rows["GPU peak"]
    assert "one_at_a_time 7.47 GB (load 7.26 GB, explore 6.79 GB, regenerate 7.47 GB, " in rows["GPU peak"]
    assert "one_at_a_time moves the same bytes: all 48 prompts of an iteration are explored" in rows["lay_down"]
    assert found.laid_down > found.host  # main memory has once what several workers lay down
    laid_down = f"{size_in_words(found.laid_down)}, which all workers of a GPU together lay down"
    moved = f"{laid_down}, go down and up once at 50 GB/s"
    assert f"about {2 * found.laid_down / 50e9:.2g} s an iteration: {moved}" in rows["lay_down"]
    assert fitting.sentence(arithmetic, Card(name="a card", memory=1e12)).startswith("fleet.sharing auto is keep: 1")


def test_a_peak_close_to_the_limit_is_said_to_be_with_what_takes_less() -> None:
    arithmetic = made_up()
    (found,) = cards(arithmetic)
    keep, one_at_a_time = (found.peak(way) / 1e9 for way in ("keep", "one_at_a_time"))
    advice = f"; close to the limit: --set fleet.sharing=one_at_a_time takes {one_at_a_time:.3g} GB, and more time"
    assert fitting.sentence(arithmetic, card(keep + 0.01)).endswith(advice)
    assert "close" not in fitting.sentence(made_up("compile.cudagraphs=true"), card(keep + 0.01))
    assert "close" not in fitting.sentence(arithmetic, card(keep / 0.96))
    assert "close" not in fitting.sentence(arithmetic, card(one_at_a_time + 0.01))  # nothing takes less


def test_the_base_pack_is_counted_also_where_revisions_have_no_packed_weights() -> None:
    parts = ("sd35_large", "two_stage", "diffusion_nft", "pickscore", "one_gpu", "rollout.explore.precision=fp8")
    loads, starts_from_pack = (planned(*parts, f"publish.base={base}") for base in ("checkpoint", "pack"))
    assert starts_from_pack.packed_bytes == 0  # no layer with LoRA is quantised
    without, counted = (dict(fitting.rows(run, card(150)))["lay_down"] for run in (loads, starts_from_pack))
    # 1.21 GB of samples, 2 × 0.189 of revisions; 8.06e9 weights, of which 1.80e9 take one byte and the others
    # two, as do 0.09e9 positions.
    assert "beside 1.59 GB in Ray's object store (/dev/shm: samples, two revisions); " in without
    held = "samples, two revisions, the base pack of 14.5 GB that explorers start from"
    assert f"beside 16.1 GB in Ray's object store (/dev/shm: {held}); " in counted
    said = [dict(run.rows())["explore"] for run in (starts_from_pack, planned(*parts, "all_blocks"))]
    assert "(dpm2, fp8) · 22% of the transformer's weights quantised" in said[0]
    assert "(dpm2, fp8) · 66% of the transformer's weights quantised" in said[1]


def test_who_is_alone_on_a_card_has_nothing_to_lay_down_for_others() -> None:
    split = planned("flux1_dev", "two_stage", "diffusion_nft", "pickscore", "kuberay", "rollout.explore.precision=fp8")
    assert list(dict(fitting.rows(split))) == ["GPU memory", "GPU peak"]
    assert sharing_on(split, card(80)) == "keep"
    assert fitting.sentence(split, card(80)).endswith("80 GB, which are 95% of a card")


def test_who_takes_no_turns_with_learners_keeps_weights_whatever_the_card() -> None:
    apart = made_up("fleet.learners.num_gpus=1")  # explorer and regenerator share a card of their own
    peak = max(one.peak("keep") for one in cards(apart)) / 1e9
    assert sharing_on(apart, card(peak + 0.01)) == "keep"
    assert sharing_on(apart, card(peak - 0.01)) is None
