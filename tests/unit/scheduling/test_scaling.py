from pathlib import Path

import pytest

from solrl_ray.errors import UserError
from solrl_ray.scheduling.scaling import Targets
from tests.support.small import small_config


@pytest.fixture
def targets(tmp_path: Path) -> Targets:
    """Of 1 explorer and 1 regenerator, 3 prompts in 2 units each."""
    return Targets(small_config(tmp_path, "scaled"))


def test_what_will_happen_is_said_and_remembered(targets: Targets, tmp_path: Path) -> None:
    assert targets.ask({"explorers": 4}) == (
        "explorers go from 1 to 4: new ones work once they have started and proved their weights"
    )
    assert targets.ask({"explorers": 2, "regenerators": 1}) == (
        "explorers go from 4 to 2: the newest finish their units and leave\nregenerators are already 1"
    )
    assert (targets.wanted("explorers"), targets.wanted("regenerators")) == (2, 1)
    config = small_config(tmp_path, "scaled")
    assert targets.applied(config).fleet.explorers.count == 2
    assert config.fleet.explorers.count == 1


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"explorers": 0}, "--explorers 0: it must be between 1 and 6, the 6 units of an iteration."),
        ({"explorers": 7}, "--explorers 7: it must be between 1 and 6, the 6 units of an iteration."),
        (
            {"explorers": 2, "regenerators": 4},
            "--regenerators 4: it must be between 1 and 3, the 3 groups of an iteration or prompts of an evaluation.",
        ),
        ({}, "No size was given; give the number of --explorers or --regenerators."),
    ],
)
def test_sizes_out_of_bounds_change_nothing(targets: Targets, sizes: dict[str, int], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        targets.ask(sizes)
    assert str(caught.value) == sentence
    assert targets.wanted("explorers") == 1
