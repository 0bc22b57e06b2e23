from pathlib import Path

import pytest

from solrl_ray.config.loading import load
from solrl_ray.config.pools import (
    apart,
    encoded_ahead,
    encoders,
    encodes_here,
    encoding_batch,
    is_on_a_card,
    needs_packed,
    reserved,
)
from solrl_ray.config.schema import Config
from solrl_ray.scheduling.placement import requests
from tests.support.documents import ROOT
from tests.support.small import small_config


def cards(tmp_path: Path, *settings: str, placement: str = "colocated") -> Config:
    """Two ranks, four explorers, one regenerator."""
    fleet = (
        f"fleet={{placement: {placement}, explorers: {{count: 4, num_gpus: 1, num_cpus: 1}}, "
        "regenerators: {num_gpus: 1, num_cpus: 1}, learners: {num_gpus: 1, num_cpus: 3}}"
    )
    return small_config(tmp_path, "cards", fleet, "learner.world_size=2", *settings)


def test_on_a_card_are_the_samplers_with_the_number_of_a_rank(tmp_path: Path) -> None:
    config = cards(tmp_path)
    assert [is_on_a_card(config, "explorers", slot) for slot in range(4)] == [True, True, False, False]
    assert is_on_a_card(config, "regenerators", 0)
    assert {name: pool.count for name, pool in apart(config).items()} == {"explorers": 2}
    assert (reserved(config, "num_gpus"), reserved(config, "num_cpus")) == (2 + 2, 2 * 3 + 2)


def test_split_nobody_is_on_a_learners_card(tmp_path: Path) -> None:
    config = cards(tmp_path, placement="split")
    assert not is_on_a_card(config, "explorers", 0)
    assert {name: pool.count for name, pool in apart(config).items()} == {"explorers": 4, "regenerators": 1}
    assert reserved(config, "num_gpus") == 2 + 4 + 1


def test_packed_revisions_are_for_explorers_without_a_learner(tmp_path: Path) -> None:
    config = cards(tmp_path)
    assert [needs_packed(config, explorers) for explorers in (1, 2, 3)] == [False, False, True]
    assert needs_packed(cards(tmp_path, placement="split"), 1)


def test_encoders_reserve_their_own_unless_cards_encode(tmp_path: Path) -> None:
    more = "fleet.encoders={count: 3, num_gpus: 1}"
    split, together = cards(tmp_path, more, placement="split"), cards(tmp_path, more)
    assert (encoders(split), encoders(together)) == (3, 2)
    assert reserved(split, "num_gpus") == 2 + 4 + 1 + 3
    assert reserved(together, "num_gpus") == 2 + 2
    assert (encoding_batch(split.fleet), encoding_batch(together.fleet)) == (16, 16)
    assert (encoded_ahead(split.fleet), encoded_ahead(together.fleet)) == (1, 16)
    on_cpus = cards(tmp_path, "fleet.encoders.threads=4", placement="split")
    assert (encoders(on_cpus), encoding_batch(on_cpus.fleet)) == (1, 1)


def test_encoders_that_reserve_something_are_asked_for(tmp_path: Path) -> None:
    def wanted(*settings: str, placement: str = "split") -> dict[str, tuple[int, float]]:
        asked = requests(cards(tmp_path, *settings, placement=placement))
        return {each.key: (each.count, each.each["GPU"]) for each in asked if each.key == "fleet.encoders"}

    assert wanted("fleet.encoders={count: 3, num_gpus: 1}") == {"fleet.encoders": (3, 1)}
    assert wanted("fleet.encoders={count: 3, num_cpus: 2}") == {"fleet.encoders": (3, 0)}
    assert wanted("fleet.encoders={count: 3, threads: 2}") == {}  # beside the run folder, as its other helpers
    assert wanted("fleet.encoders={count: 3, num_gpus: 1}", placement="colocated") == {}


@pytest.mark.parametrize(
    ("fleet", "here"),
    [
        ("{}", True),
        ("{encoders: {num_cpus: 1}}", False),
        ("{encoders: {num_gpus: 0.5}}", False),
        ("{placement: colocated}", True),
        ("{placement: colocated, learners: {num_gpus: 1}}", False),
    ],
)
def test_encoders_live_with_the_controller_unless_they_reserve_something(fleet: str, here: bool) -> None:
    config = load([ROOT / "configs" / "demo.yaml"], [f"fleet={fleet}"])
    assert encodes_here(config.fleet) is here
