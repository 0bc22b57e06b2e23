"""What a run holds of a card: sums done by hand, and peaks that were measured."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from solrl_ray.config import named
from solrl_ray.config.loading import Sources, load
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.models.shapes import shipped
from solrl_ray.planning.arithmetic import Arithmetic, ModelFacts, describe
from solrl_ray.planning.gpu_memory import (
    CONTEXT,
    ENCODE,
    EVALUATE,
    EXPLORE,
    LEARN,
    LOAD,
    PUBLISH,
    REGENERATE,
    ProcessMemory,
    gpu_memories,
    gpus,
)
from solrl_ray.planning.outline import facts_of

PROMPTS = "prompts={train: train.txt, heldout: heldout.txt}"
FACTS = ModelFacts(
    latent_shape=(1, 10, 10),
    parameters=10**9,
    lora_modules=1,
    lora_parameters=10**6,
    packed_bytes=10**8,
    recomputed_bytes=10**8,
    activation_bytes=10**9,
    explorer_bytes=15 * 10**8,
    quantized_parameters=5 * 10**8,
    touched_parameters=2 * 10**8,
    plain_touched_parameters=10**8,
    forward_bytes=10**7,
    decoding_bytes=10**8,
    decoder_parameters=5 * 10**7,
    text_parameters=3 * 10**8,
)
"""A model whose sums are done in the head."""


def planned(*parts: str, facts: ModelFacts | None = None) -> Arithmetic:
    """Names of parts, then settings."""
    files = [Path(part) for part in parts if "=" not in part]
    config = load(named.resolve(files), [PROMPTS, *(part for part in parts if "=" in part)])
    shapes = shipped(config.model)
    assert shapes is not None
    return describe(config, facts or facts_of(config, Sources(), shapes, pool_sampling(config).tier))


def made_up(*settings: str) -> Arithmetic:
    small = (
        "model.resolution=100",
        "model.decoding.micro_batch=4",
        "rollout.explore.precision=fp8",
        "rollout.explore.micro_batch=8",
        "rollout.regenerate.micro_batch=6",
        "evaluation.samples=2",
        "learner={micro_batch: 3, activation_memory: 0.5, updates: 1}",
    )
    return planned("flux1_dev", "two_stage", "diffusion_nft", "clipscore", "one_gpu", *small, *settings, facts=FACTS)


# In GB, of FACTS.
BASE, COPY = 2.0, 0.4  # 10⁹ weights; those that LoRA touches
QUANTISED = 1.5 - 2 * 0.5  # the explorer's transformer without the layers that stay unquantised
FROZEN = 2 * (0.5 - 0.1)  # quantised weights that LoRA does not touch
REWARD, DECODER = 1.71, 0.1
PROCESS = CONTEXT / 1e9
POLICIES = 7 * 4 * 1e6 / 1e9  # default, old, EMA, gradient; AdamW's copy and two moments
RANK = PROCESS + 0.5 + POLICIES
PLAIN = 0.2  # weights that LoRA touches and explorers do not quantise: an explorer has its own
HELD = BASE + COPY + PLAIN + DECODER + REWARD + RANK
IMAGE = 2 * 3 * 100 * 100 * 4 / 1e9
EXPLORES = 1.1 * (8 * (0.01 + IMAGE) + 4 * 0.1)
REGENERATES = 1.1 * (6 * (0.01 + IMAGE) + 4 * 0.1)
EVALUATES = 1.1 * (2 * (0.01 + IMAGE) + 2 * 0.1)
LEARNS = 1.1 * 3 * (0.1 + 0.5 * 0.9)
STAGED = 1.1 * 0.1
ENCODES = 2 * 0.3
SPLIT = "fleet={placement: split, explorers: {num_gpus: 0.5}, regenerators: {num_gpus: 0.5}, learners: {num_gpus: 1}}"

COLOCATED = (
    "fleet={{placement: colocated, explorers: {{count: {0}, num_gpus: 1}}, regenerators: {{count: {0}, num_gpus: 1}}, "
    "learners: {{num_gpus: 1}}}}"
)
SHARING = (
    "fleet={{explorers: {{count: 2, num_gpus: {0}}}, regenerators: {{count: 2, num_gpus: {0}}}, "
    "learners: {{num_gpus: 1}}}}"
)


FLOW_GRPO = "objective.kind=flow_grpo"


def gigabytes(process: ProcessMemory) -> dict[str, float]:
    return {stage: process.at(stage) / 1e9 for stage in process.stages}


def test_a_card_with_one_process_has_one_base_and_in_each_stage_what_that_needs() -> None:
    (card,) = gpu_memories(made_up())
    (process,) = card.processes
    assert process.roles == ("explorer", "regenerator", "learner rank")
    assert gigabytes(process) == pytest.approx(
        {
            LOAD: HELD,
            ENCODE: HELD + ENCODES,
            EXPLORE: HELD + QUANTISED + EXPLORES,
            REGENERATE: HELD + QUANTISED + REGENERATES,  # while other prompts are explored
            EVALUATE: HELD + QUANTISED + EVALUATES,
            LEARN: HELD + LEARNS,
        }
    )
    assert card.peak / 1e9 == pytest.approx(HELD + LEARNS)
    assert process.fullest == LEARN


@pytest.mark.parametrize(("objective", "learns"), [(FLOW_GRPO, 3), ("objective.kind=diffusion_nft", 0)])
def test_guidance_is_one_more_forward_of_each_sample_and_keeps_no_activations(objective: str, learns: int) -> None:
    """Learners have one only if they train guided velocities: a forward of 0.01 GB for each of 3 samples."""
    kept, guided = (
        gigabytes(gpu_memories(made_up(*settings, objective))[0].processes[0])
        for settings in ((), ("model.cfg.scale=4",))
    )
    more = {stage: guided[stage] - kept[stage] for stage in kept}
    forwards = {EXPLORE: 8, REGENERATE: 6, EVALUATE: 2, LEARN: learns}
    assert more == pytest.approx({stage: 1.1 * forwards.get(stage, 0) * 0.01 for stage in kept})
    unguided = gigabytes(gpu_memories(made_up("evaluation.cfg.scale=4"))[0].processes[0])
    assert unguided[EVALUATE] == pytest.approx(guided[EVALUATE])
    assert unguided[EXPLORE] == pytest.approx(kept[EXPLORE])


def test_an_evaluation_has_all_prompts_of_a_forward_at_once() -> None:
    (process,) = gpu_memories(made_up("evaluation.micro_batch=7"))[0].processes  # of two samples each
    decoded = 4 * 0.1
    assert gigabytes(process)[EVALUATE] == pytest.approx(HELD + QUANTISED + 1.1 * (6 * (0.01 + IMAGE) + decoded))


def test_offloaded_frozen_weights_are_gone_while_exploring_and_then_the_quantised_copy_is() -> None:
    (card,) = gpu_memories(made_up("fleet.offload=true"))
    stages, kept = gigabytes(card.processes[0]), gigabytes(gpu_memories(made_up())[0].processes[0])
    assert stages[ENCODE] == pytest.approx(HELD - FROZEN + ENCODES)
    assert stages[EXPLORE] == pytest.approx(HELD - FROZEN + QUANTISED + EXPLORES)
    assert stages[REGENERATE] == pytest.approx(HELD + REGENERATES)
    assert stages[EVALUATE] == pytest.approx(HELD + EVALUATES)
    assert (stages[LOAD], stages[LEARN]) == (kept[LOAD], kept[LEARN])
    assert card.offloaded / 1e9 == pytest.approx(FROZEN)
    assert gpu_memories(made_up())[0].offloaded == 0


def test_encoders_with_gpus_of_their_own_hold_text_encoders_alone() -> None:
    made = gpu_memories(made_up(SPLIT, "fleet.encoders={count: 2, num_gpus: 1}"))
    (alone,) = (card for card in made if card.roles == ("text encoder",))
    assert gigabytes(alone.processes[0]) == pytest.approx({ENCODE: PROCESS + ENCODES})
    assert all(ENCODE not in process.stages for card in made if card is not alone for process in card.processes)
    assert all("text encoder" not in card.roles for card in gpu_memories(made_up(SPLIT)))  # on CPUs


def test_with_references_an_encoder_also_holds_the_autoencoder() -> None:
    made = gpu_memories(made_up(SPLIT, "fleet.encoders={count: 1, num_gpus: 1}", "model.references=1"))
    (alone,) = (card for card in made if card.roles == ("text encoder",))
    assert gigabytes(alone.processes[0]) == pytest.approx({ENCODE: PROCESS + ENCODES + 2 * 0.05 + 0.1})


def test_a_card_packs_revisions_only_if_an_explorer_has_no_learner_in_its_process() -> None:
    alone, beside = gpu_memories(made_up("fleet.explorers.count=2"))
    assert beside.processes[0].roles == ("explorer",)
    stages = gigabytes(alone.processes[0])
    assert stages[PUBLISH] == pytest.approx(HELD + STAGED)
    assert PUBLISH not in gpu_memories(made_up())[0].processes[0].stages


def test_what_nobody_samples_with_is_not_on_a_card_that_only_learns() -> None:
    both, learns = gpu_memories(made_up("learner.world_size=2"))
    assert (both.roles, learns.roles) == (("explorer", "regenerator", "learner rank"), ("learner rank",))
    share = POLICIES - 3 * 4e-3 * 0.5  # AdamW's tensors are shared by two
    assert learns.processes[0].held / 1e9 == pytest.approx(BASE + PROCESS + 0.5 + share)


def test_split_each_process_has_its_own_copy_and_all_of_a_card_are_at_their_fullest() -> None:
    learner, samplers = sorted(gpu_memories(made_up(SPLIT)), key=lambda card: len(card.processes))
    explorer, regenerator = samplers.processes
    held = 1.5 + 0.2 + DECODER + REWARD + PROCESS
    assert gigabytes(explorer) == pytest.approx({LOAD: held, EXPLORE: held + EXPLORES, PUBLISH: held + STAGED})
    held = BASE + COPY + DECODER + REWARD + PROCESS
    expected = {LOAD: held, REGENERATE: held + REGENERATES, EVALUATE: held + EVALUATES}
    assert gigabytes(regenerator) == pytest.approx(expected)
    assert samplers.peak == explorer.at(EXPLORE) + regenerator.at(REGENERATE)
    assert gigabytes(learner.processes[0]) == pytest.approx({LOAD: BASE + RANK, LEARN: BASE + RANK + LEARNS})


def test_where_factors_alone_are_sent_explorers_keep_what_they_merge_into() -> None:
    def explorer(*settings: str) -> ProcessMemory:
        return next(
            p for card in gpu_memories(made_up(SPLIT, *settings)) for p in card.processes if "explorer" in p.roles
        )

    factors = explorer("publish.mode=lora")
    assert factors.holds["copy of layers with LoRA"] == 4 * 10**8  # quantised layers' as well
    assert factors.at(PUBLISH) == factors.held


ONE = ("explorer", "regenerator", "learner rank")


@pytest.mark.parametrize(
    ("cluster", "settings", "kinds"),
    [
        ("one_gpu", (), [ONE]),
        ("eight_gpus", (), [ONE]),
        ("eight_gpus", ("fleet.explorers.count=12",), [ONE, ("explorer",)]),
        ("eight_gpus", ("fleet.explorers.count=2",), [ONE, ONE[1:]]),
        ("kuberay", (), [("regenerator",), ("learner rank",), ("explorer",)]),
        ("kuberay", ("fleet.explorers.num_gpus=0.5",), [("explorer", "explorer"), ("regenerator",), ("learner rank",)]),
        ("kuberay", ("fleet.explorers.num_gpus=0", "fleet.regenerators.num_gpus=0"), [("learner rank",)]),
    ],
)
def test_processes_share_cards_as_their_placement_and_shares_allow(
    cluster: str, settings: tuple[str, ...], kinds: list[tuple[str, ...]]
) -> None:
    arithmetic = planned("flux1_dev", "two_stage", "diffusion_nft", "clipscore", cluster, *settings, facts=FACTS)
    found = gpu_memories(arithmetic)
    assert sorted(card.roles for card in found) == sorted(kinds)
    assert [card.peak for card in found] == sorted((card.peak for card in found), reverse=True)


def test_nothing_is_on_a_card_where_everybody_computes_on_cpus() -> None:
    assert gpu_memories(planned("flux1_dev", "two_stage", "diffusion_nft", "clipscore", facts=FACTS)) == ()


def test_flux_fits_a_card_of_80_gb_with_nothing_moved() -> None:
    (card,) = gpu_memories(planned("flux1_dev_80gb", "learner={activation_memory: 1, micro_batch: 6}"))
    stages = gigabytes(card.processes[0])
    # 23.8 of base, 3.6 that LoRA touches, 1 of policies and AdamW, 4.1 of decoder and rewards, 1.2 of the process;
    # six samples' activations are 31.
    assert stages[LEARN] == pytest.approx(66, rel=0.05)
    assert stages[EXPLORE] == pytest.approx(48, rel=0.05)


def test_measured_peaks_are_foretold() -> None:
    """Of FLUX.1-dev on two H100s (many_gpus.json): a learner rank, and explorer with regenerator on the other card."""
    given = ("rollout.explore.precision=fp8", "learner={activation_memory: 1, micro_batch: 6}")
    small = "evaluation={prompts: 1, samples: 1}"
    found = gpu_memories(planned("flux1_dev", "two_stage", "diffusion_nft", "clipscore", SPLIT, *given, small))
    assert [card.peak / 1e9 for card in found] == pytest.approx([59.6, 57.9], rel=0.05)


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (("fleet={explorers: {count: 3}, regenerators: {count: 2}}", "learner.world_size=4"), 9),  # no share: one each
        ((COLOCATED.format(8), "learner.world_size=8"), 8),
        ((COLOCATED.format(8), "learner.world_size=16"), 16),
        ((COLOCATED.format(16), "learner.world_size=8"), 8 + 2 * 8),  # who is beyond the ranks has another
        ((SHARING.format(0.5), "learner.world_size=4"), 2 + 4),
        ((SHARING.format(0.6), "learner.world_size=4"), 4 + 4),
        ((SHARING.format(2), "learner.world_size=4"), 2 * 4 + 4),
        ((SHARING.format(1), "learner.world_size=4", "fleet.encoders={count: 2, num_gpus: 1}"), 4 + 4 + 2),
    ],
)
def test_the_gpus_of_a_fleet_are_counted(settings: tuple[str, ...], count: int) -> None:
    config = planned("flux1_dev", "two_stage", "diffusion_nft", "clipscore", *settings, facts=FACTS).config
    assert gpus(config) == count


def cards_by_hand(explorers: int, share: float, regenerators: int, other: float, learners: float) -> int:
    """How many cards first fit needs for one rank and these samplers, in turn; looks at every card each time."""
    turn = [learners]
    for place in range(max(explorers, regenerators)):
        turn += [share] * (place < explorers) + [other] * (place < regenerators)
    cards: list[float] = []
    for each in turn:
        fits = [place for place, used in enumerate(cards) if used + each <= 1 + 1e-6]
        if fits:
            cards[fits[0]] += each
        else:
            cards.append(each)
    return len(cards)


@pytest.mark.parametrize(("share", "other"), [(0.3, 0.7), (0.6, 0.1), (0.5, 0.5), (0.2, 0.45), (1.0, 0.25)])
@pytest.mark.parametrize(("explorers", "regenerators"), [(1, 7), (13, 5), (40, 40)])
def test_processes_are_put_on_the_first_card_with_room(
    share: float, other: float, explorers: int, regenerators: int
) -> None:
    sizes = (
        f"fleet.explorers={{count: {explorers}, num_gpus: {share}}}",
        f"fleet.regenerators={{count: {regenerators}, num_gpus: {other}}}",
    )
    made = made_up(SPLIT, *sizes).config
    expected = cards_by_hand(explorers, share, regenerators, other, min(1.0, made.fleet.learners.num_gpus))
    assert gpus(made) == expected


def test_thousands_of_workers_are_planned_at_once() -> None:
    """Looking at every card for every process would take a minute for these."""
    sizes = [f"fleet.{pool}.count=4096" for pool in ("explorers", "regenerators")]
    began = time.process_time()
    for settings in ((*sizes, "learner.world_size=4096"), (SPLIT, *sizes)):
        made = made_up(*settings)
        assert gpus(made.config) == (4096 if SPLIT not in settings else 4097)
        assert gpu_memories(made)
    assert time.process_time() - began < 5.0
