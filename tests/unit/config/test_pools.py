from pathlib import Path

import pytest

from solrl_ray.config.pools import (
    apart,
    encoded_ahead,
    encoders,
    encoding_batch,
    is_on_a_card,
    kinds_of_prompts,
    needs_packed,
    prompts_of,
    reserved,
)
from solrl_ray.config.schema import Config
from solrl_ray.scheduling.placement import requests
from tests.support.small import small_config


def test_without_other_explorers_prompts_are_nobodys_in_particular(tmp_path: Path) -> None:
    assert kinds_of_prompts(small_config(tmp_path, "one")) == ()


@pytest.mark.parametrize(
    ("prompts", "others", "kinds"),
    [
        (4, "[{name: a, prompts: 2}]", ("", "a", "", "a")),
        (8, "[{name: a, prompts: 2}]", ("", "", "a", "", "", "", "a", "")),
        (6, "[{name: a, prompts: 2}, {name: b, prompts: 1}]", ("", "a", "", "b", "a", "")),
    ],
)
def test_each_kind_gets_its_prompts_evenly_spread(
    prompts: int, others: str, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    config = small_config(tmp_path, "mixed", f"rollout.prompts={prompts}", f"fleet.other_explorers={others}")
    assert kinds_of_prompts(config) == kinds
    counts = {"explorers" + (f"_{kind}" if kind else ""): kinds.count(kind) for kind in dict.fromkeys(kinds)}
    assert counts == prompts_of(config)


def test_every_prompt_has_one_kind_whatever_the_shares(tmp_path: Path) -> None:
    for a, b in ((1, 1), (13, 7), (40, 7), (1, 46)):
        others = f"fleet.other_explorers=[{{name: a, prompts: {a}}}, {{name: b, prompts: {b}}}]"
        kinds = kinds_of_prompts(small_config(tmp_path, "mixed", "rollout.prompts=48", others))
        assert (len(kinds), kinds.count("a"), kinds.count("b")) == (48, a, b)
        for upto in range(49):  # nobody is ever more than a prompt ahead of its share
            assert abs(kinds[:upto].count("a") - a * upto / 48) <= 1


OTHERS = "fleet.other_explorers=[{name: l40s, count: 3, prompts: 1, num_gpus: 1}]"


def cards(tmp_path: Path, *settings: str, placement: str = "colocated") -> Config:
    """Two ranks, four explorers, one regenerator."""
    fleet = (
        f"fleet={{placement: {placement}, explorers: {{count: 4, num_gpus: 1, num_cpus: 1}}, "
        "regenerators: {num_gpus: 1, num_cpus: 1}, learners: {num_gpus: 1, num_cpus: 3}}"
    )
    return small_config(tmp_path, "cards", fleet, "learner.world_size=2", *settings)


def test_on_a_card_are_the_samplers_with_the_number_of_a_rank(tmp_path: Path) -> None:
    config = cards(tmp_path, OTHERS)
    assert [is_on_a_card(config, "explorers", slot) for slot in range(4)] == [True, True, False, False]
    assert is_on_a_card(config, "regenerators", 0)
    assert not is_on_a_card(config, "explorers_l40s", 0)
    assert {name: pool.count for name, pool in apart(config).items()} == {"explorers": 2, "explorers_l40s": 3}
    assert (reserved(config, "num_gpus"), reserved(config, "num_cpus")) == (2 + 2 + 3, 2 * 3 + 2)


def test_split_nobody_is_on_a_learners_card(tmp_path: Path) -> None:
    config = cards(tmp_path, placement="split")
    assert not is_on_a_card(config, "explorers", 0)
    assert {name: pool.count for name, pool in apart(config).items()} == {"explorers": 4, "regenerators": 1}
    assert reserved(config, "num_gpus") == 2 + 4 + 1


def test_packed_revisions_are_for_explorers_without_a_learner(tmp_path: Path) -> None:
    config = cards(tmp_path)
    assert [needs_packed(config, explorers) for explorers in (1, 2, 3)] == [False, False, True]
    assert needs_packed(cards(tmp_path, OTHERS), 1)
    assert needs_packed(cards(tmp_path, placement="split"), 1)


def test_other_explorers_ask_for_places_of_their_own(tmp_path: Path) -> None:
    others = "fleet.other_explorers=[{name: l40s, count: 3, prompts: 1, num_gpus: 1, labels: {gpu: l40s}}]"
    asked = {request.key: request for request in requests(small_config(tmp_path, "mixed", others))}
    assert list(asked) == ["fleet.explorers", "fleet.other_explorers.0", "fleet.regenerators", "fleet.learners"]
    other = asked["fleet.other_explorers.0"]
    assert (other.count, other.each["GPU"], other.labels) == (3, 1.0, {"gpu": "l40s"})


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
