"""How many losses a run tolerates."""

import pytest

from solrl_ray.errors import RunError
from solrl_ray.scheduling.replacements import Replacements


def test_as_many_losses_as_stated_are_paid_for_and_the_next_one_ends_the_run() -> None:
    replacements = Replacements(2)
    replacements.spend("explorer-0", "it was killed")
    replacements.spend("explorer-1", "it was killed")
    assert replacements.left == 0
    with pytest.raises(RunError, match=r"explorer-2 was lost \(a hang\), and all 2 replacements"):
        replacements.spend("explorer-2", "a hang")
