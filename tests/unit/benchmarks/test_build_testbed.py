"""What trains the testbed's networks: batches of captions, and rectification."""

from __future__ import annotations

import copy

import torch
from testbed_assets import captions, flow_matching
from testbed_assets.networks import Training, flux_pipeline

from solrl_ray.testbed import world

PAIR = "a small blue ring left of a large green cross on white"


def scenes(count: int = 200) -> torch.Tensor:
    return captions.draw(count, torch.Generator().manual_seed(0), single=0.3)


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


def test_a_near_miss_differs_in_one_word_or_by_an_exchange() -> None:
    batch = scenes()
    missed = captions.neighbours(batch, torch.Generator().manual_seed(1))
    for before, after in zip(batch.tolist(), missed.tolist(), strict=True):
        differing = [i for i in range(9) if before[i] != after[i]]
        exchanged = differing in ([1, 5], [2, 6], [3, 7]) and [after[i] for i in differing[::-1]] == [
            before[i] for i in differing
        ]
        assert len(differing) <= 1 or exchanged
        assert before[0] == after[0]


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


def test_rectification_trains_on_the_models_own_pairs_and_takes_its_disturbance_back() -> None:
    pipeline = flux_pipeline(0)
    before = copy.deepcopy(pipeline.transformer.state_dict())
    noise = flow_matching._RoundingNoise(pipeline.transformer, torch.Generator().manual_seed(0))
    noise.add()
    moved = {name for name, value in pipeline.transformer.state_dict().items() if not torch.equal(value, before[name])}
    assert "single_transformer_blocks.0.attn.to_q.weight" in moved
    assert not any("norm" in name or "embed" in name for name in moved)
    noise.remove()
    assert all(torch.equal(value, before[name]) for name, value in pipeline.transformer.state_dict().items())

    training = Training(steps=2, batch=4, lr=1e-3, seed=0, averaging=0.9)
    result = flow_matching.rectify(pipeline, training, pairs=4, heldout=torch.tensor([0]), device=torch.device("cpu"))
    # On its own pairs a model is nearly right before it learns; on the world's it would be off by about 2.
    assert 0 < result["loss"] < 0.05
    assert not torch.equal(pipeline.transformer.proj_out.weight, before["proj_out.weight"])
