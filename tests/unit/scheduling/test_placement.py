"""Whether actors have room on a cluster's nodes, by resources and labels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.client.evaluate import with_regenerators_alone
from solrl_ray.config.schema import Config
from solrl_ray.scheduling.placement import Node, ResourceRequest, fit, matches, requests, table
from tests.support.learning import config
from tests.support.made_configs import changed

LEARNERS = Node(resources={"CPU": 16.0, "GPU": 4.0}, labels={"role": "learner"})
EXPLORER = Node(resources={"CPU": 4.0, "GPU": 1.0}, labels={"role": "explorer", "accelerator": "B200"})


def missing(wanted: list[ResourceRequest], nodes: list[Node]) -> dict[str, int]:
    return {entry.request.key: entry.missing for entry in fit(wanted, nodes)}


def test_actors_ask_for_nothing_that_their_request_does_not_name() -> None:
    request = ResourceRequest(key="fleet.explorers", count=3, each={"CPU": 2.0})
    assert (request.total("CPU"), request.total("GPU")) == (6.0, 0.0)


def test_actors_have_room_only_on_nodes_with_their_labels() -> None:
    explorers = ResourceRequest(key="explorers", count=3, each={"GPU": 1.0}, labels={"role": "explorer"})
    ranks = ResourceRequest(key="learners", count=2, each={"GPU": 1.0}, labels={"role": "learner"})
    assert missing([explorers, ranks], [LEARNERS, EXPLORER, EXPLORER]) == {"explorers": 1, "learners": 0}
    assert missing([explorers, ranks], [EXPLORER] * 3) == {"explorers": 0, "learners": 2}


SPOT, RESERVED = (Node(resources={"CPU": 2.0}, labels={"market": market}) for market in ("spot", "reserved"))


def test_who_has_a_second_choice_takes_it_where_the_first_has_no_room_and_leaves_it_to_others_else() -> None:
    workers = {"num_cpus": 1, "labels": {"market": "spot"}, "fallback_labels": [{"market": "reserved"}, {}]}
    explorers, regenerators, _ = requests(
        run_with({}, workers, {"num_cpus": 1, "labels": {"market": "reserved"}}, ranks=1)
    )
    assert missing([explorers, regenerators], [RESERVED, SPOT]) == {"fleet.explorers": 0, "fleet.regenerators": 0}
    assert missing([replace(explorers, count=4)], [RESERVED, SPOT]) == {"fleet.explorers": 0}
    assert missing([replace(explorers, count=5)], [RESERVED, SPOT, LEARNERS]) == {"fleet.explorers": 0}
    assert missing([replace(explorers, count=5, fallbacks=explorers.fallbacks[:1])], [RESERVED, SPOT, LEARNERS]) == {
        "fleet.explorers": 1
    }
    _, row = table(fit([explorers], [RESERVED, SPOT])).splitlines()
    assert row == "fleet.explorers  2       1 CPU  market=spot, else market=reserved, else any  2      4 CPU    none"


def test_one_actor_does_not_spread_over_nodes() -> None:
    large = ResourceRequest(key="learners", count=1, each={"GPU": 2.0})
    assert missing([large], [EXPLORER] * 8) == {"learners": 1}


def test_the_largest_actors_are_placed_first_whatever_the_order() -> None:
    small = ResourceRequest(key="explorers", count=2, each={"GPU": 1.0})
    large = ResourceRequest(key="learners", count=1, each={"GPU": 4.0})
    assert missing([small, large], [LEARNERS, EXPLORER, EXPLORER]) == {"explorers": 0, "learners": 0}


def run_with(
    learners: dict[str, Any], explorers: dict[str, Any], regenerators: dict[str, Any] | None = None, *, ranks: int
) -> Config:
    fleet = {"learners": learners, "explorers": {"count": 2} | explorers, "regenerators": regenerators or {}}
    return config(Path("unused"), learner={"world_size": ranks}, fleet=fleet)


def test_ranks_leave_nodes_with_labels_to_pools() -> None:
    labelled = {"num_gpus": 1, "labels": {"role": "explorer"}}
    whole = requests(run_with({"num_gpus": 1, "num_cpus": 4}, labelled, ranks=4))
    assert missing(whole, [EXPLORER, EXPLORER, LEARNERS])["fleet.explorers"] == 0
    assert missing(whole, [EXPLORER, EXPLORER, LEARNERS])["fleet.learners"] == 0


def colocated(ranks: int, **counts: int) -> Config:
    worker = {"num_gpus": 1, "num_cpus": 2}
    pools = {pool: worker | {"count": count} for pool, count in counts.items()}
    settings = run_with({"num_gpus": 1, "num_cpus": 4}, pools["explorers"], pools["regenerators"], ranks=ranks)
    return changed(settings, fleet={"placement": "colocated"})


def test_a_card_is_one_request_with_the_resources_of_learners() -> None:
    (cards,) = requests(colocated(2, explorers=2, regenerators=1))
    assert (cards.key, cards.count, cards.each) == ("fleet.learners", 2, {"GPU": 1.0, "CPU": 4.0})


def test_who_is_beyond_the_ranks_has_a_place_of_its_own_after_them() -> None:
    explorers, regenerators, cards = requests(colocated(2, explorers=5, regenerators=3))
    assert [(each.key, each.count, each.each["CPU"]) for each in (explorers, regenerators)] == [
        ("fleet.explorers", 3, 2.0),
        ("fleet.regenerators", 1, 2.0),
    ]
    assert missing([explorers, cards], [EXPLORER, EXPLORER]) == {"fleet.explorers": 3, "fleet.learners": 0}


@pytest.mark.parametrize(
    ("placement", "nodes", "lacking"),
    [
        ("PACK", [EXPLORER] * 3, 0),
        ("STRICT_PACK", [EXPLORER] * 3, 2),
        ("STRICT_PACK", [EXPLORER, LEARNERS], 0),
        ("STRICT_SPREAD", [EXPLORER, LEARNERS], 1),
        ("STRICT_SPREAD", [Node(resources={"CPU": 64.0}), EXPLORER, LEARNERS, LEARNERS], 0),
        ("SPREAD", [LEARNERS], 0),
        ("STRICT_PACK", [], 3),
    ],
)
def test_ranks_have_room_only_together_or_apart_if_they_must(placement: str, nodes: list[Node], lacking: int) -> None:
    ranks = ResourceRequest(key="learners", count=3, each={"GPU": 1.0}, placement=placement)
    assert missing([ranks], nodes) == {"learners": lacking}


def test_the_placement_that_leaves_no_room_is_named() -> None:
    settings = run_with({"num_gpus": 1, "num_cpus": 2, "placement": "STRICT_SPREAD"}, {"num_gpus": 1}, ranks=2)
    explorers, _, ranks = requests(settings)
    assert explorers.describe() == "1 GPU each"
    assert replace(explorers, each={"GPU": 0.5}).describe() == "0.5 GPU each, of one GPU"
    assert ranks.describe() == "1 GPU, 2 CPU each, each on a different node: fleet.learners.placement STRICT_SPREAD"


def test_an_evaluation_by_itself_asks_for_regenerators_alone() -> None:
    settings = run_with({"num_gpus": 1, "placement": "STRICT_PACK"}, {"num_gpus": 1}, ranks=2)
    more = changed(settings, fleet={"regenerators": {"count": 3, "num_gpus": 1}})
    alone = requests(with_regenerators_alone(more))
    assert {request.key: request.total("GPU") for request in alone} == {
        "fleet.explorers": 0,
        "fleet.regenerators": 3,
        "fleet.learners": 0,
    }
    assert missing(alone, [LEARNERS])["fleet.learners"] == 0


def test_ten_tenths_of_a_gpu_are_one() -> None:
    tenths = ResourceRequest(key="explorers", count=10, each={"GPU": 0.1})
    assert missing([tenths], [EXPLORER]) == {"explorers": 0}


TWO = Node(resources={"CPU": 8.0, "GPU": 2.0})


@pytest.mark.parametrize(
    ("share", "count", "lacking"),
    [(0.6, 2, 0), (0.6, 3, 1), (0.5, 4, 0), (0.4, 5, 1), (0.34, 5, 1), (1.0, 2, 0), (2.0, 1, 0), (3.0, 1, 1)],
)
def test_a_share_of_a_gpu_is_of_one_card(share: float, count: int, lacking: int) -> None:
    workers = ResourceRequest(key="explorers", count=count, each={"GPU": share})
    assert missing([workers], [TWO]) == {"explorers": lacking}


def test_whole_cards_are_those_of_which_nobody_has_a_share() -> None:
    share, whole = (
        ResourceRequest(key="share", count=1, each={"GPU": 0.1}),
        ResourceRequest(key="whole", count=2, each={"GPU": 1.0}),
    )
    assert missing([share, whole], [TWO]) == {"share": 1, "whole": 0}  # the largest first
    assert missing([share, replace(whole, turn=1)], [TWO]) == {"share": 0, "whole": 1}


@pytest.mark.parametrize(
    ("explorers", "regenerators", "lacking"),
    [
        (0.6, 0.4, {"fleet.explorers": 0, "fleet.regenerators": 0, "fleet.learners": 0}),
        # As Ray 2.60 places them: both explorers on one card, which leaves 0.2 of it and one card.
        (0.4, 0.6, {"fleet.explorers": 0, "fleet.regenerators": 1, "fleet.learners": 0}),
        (0.6, 0.5, {"fleet.explorers": 0, "fleet.regenerators": 2, "fleet.learners": 0}),  # 0.4 is left of each card
    ],
)
def test_shares_have_room_if_they_have_it_in_the_order_in_which_a_run_makes_them(
    explorers: float, regenerators: float, lacking: dict[str, int]
) -> None:
    pools = {"num_gpus": explorers}, {"num_gpus": regenerators, "count": 2}
    assert missing(requests(run_with({"num_gpus": 0}, *pools, ranks=2)), [TWO]) == lacking


@pytest.mark.parametrize(
    ("condition", "holds"),
    [("B200", True), ("H200", False), ("!H200", True), ("in(H200, B200)", True), ("!in(H200,B200)", False)],
)
def test_selectors_are_those_of_ray(condition: str, holds: bool) -> None:
    assert matches(EXPLORER.labels, {"accelerator": condition}) is holds


def test_a_node_without_the_label_meets_only_a_negation() -> None:
    assert not matches(LEARNERS.labels, {"accelerator": "B200"})
    assert matches(LEARNERS.labels, {"accelerator": "!B200"})


def test_the_table_names_wanted_present_and_missing() -> None:
    explorers = ResourceRequest(
        key="fleet.explorers", count=3, each={"GPU": 1.0, "CPU": 2.0}, labels={"role": "explorer"}
    )
    header, row = table(fit([explorers], [LEARNERS, EXPLORER])).splitlines()
    assert header.split() == ["actors", "each", "labels", "nodes", "present", "missing"]
    assert row == "fleet.explorers  3       1 GPU, 2 CPU  role=explorer  1      1 GPU, 4 CPU  2"
