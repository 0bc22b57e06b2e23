"""Batches of the testbed's captions, of which the moving world is made."""

from __future__ import annotations

import torch
from testbed_assets import captions

from solrl_ray.testbed import world

PAIR = "a small blue ring left of a large green cross on white"


def meaning(caption: str) -> int:
    return int(captions.meaning(torch.tensor([world.parse(caption).fields])))


def test_corruption_replaces_the_stated_share_of_words() -> None:
    batch = captions.draw(4000, torch.Generator().manual_seed(0), single=0.0)
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(captions.corrupt(batch, 0.0, generator), batch)
    changed = (captions.corrupt(batch, 0.25, generator) != batch)[:, 1:].float().mean(dim=0)
    kinds = torch.tensor([len(values) for values in world.FIELD_VALUES])
    # A random word of n is the old one with probability 1 / n.
    torch.testing.assert_close(changed, 0.25 * (1 - 1 / kinds), atol=0.02, rtol=0)


def test_mirrored_captions_mean_the_same_and_nothing_else_does() -> None:
    assert meaning(PAIR) == meaning("a large green cross right of a small blue ring on white")
    assert meaning(PAIR) != meaning("a large green cross left of a small blue ring on white")
    above, below = (meaning(f"a small red ring {r} a small red ring on grey") for r in ("above", "below"))
    assert above == below


def test_of_all_scenes_those_of_two_objects_mean_the_same_in_pairs() -> None:
    indices = torch.cartesian_prod(*[torch.arange(len(values)) for values in world.FIELD_VALUES])
    pairs = torch.cat([torch.full((len(indices), 1), 2), indices], dim=1)
    lone = torch.cat([torch.ones(len(indices), 1, dtype=torch.long), indices], dim=1)
    lone[:, 4:8] = 0
    # 2 sizes × 8 colours × 5 shapes, twice with 4 relations, on 3 backgrounds.
    assert (len(captions.meaning(pairs).unique()), len(captions.meaning(lone).unique())) == (80 * 80 * 4 * 3 // 2, 240)
