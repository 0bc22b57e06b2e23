"""Learner ranks make the deltas of a revision themselves: the same bytes for whoever receives them."""

import dataclasses

import pytest
import torch

from solrl_ray.config.schema import Publish
from solrl_ray.errors import RunError
from solrl_ray.weight_sync import payload
from solrl_ray.weight_sync.container import Unusable
from solrl_ray.weight_sync.payload import Revision
from solrl_ray.weight_sync.publication import EXPLORER, REGENERATOR, Publication, Publications
from solrl_ray.weight_sync.publish import Publisher, RevisionShard, assemble
from solrl_ray.weight_sync.receive import Receiver
from tests.support.weight_sync import LORA, OUT, QUERY, explorer, factors, publisher

PACKED = f"{QUERY}.packed"


class Ranks:
    """A learner group's publishers, and the controller's side of publishing."""

    def __init__(self, world_size: int = 1, tier: str = "nvfp4-emulated", snapshot_every: int = 10) -> None:
        self.publishers = [publisher(tier=tier) for _ in range(world_size)]
        self.publications = Publications(Publish(snapshot_every=snapshot_every))
        self.shards: list[RevisionShard] = []

    def revision(self, number: int) -> Revision:
        parent = self.publications.parent(number)
        self.shards = [
            each.shard(
                number,
                moved(number),
                rank=rank,
                world_size=len(self.publishers),
                parent=None if parent is None else parent.manifest.revision,
                keep=True,
            )
            for rank, each in enumerate(self.publishers)
        ]
        return assemble(self.shards, LORA, moved(number), parent)

    def publish(self, number: int) -> Publication:
        return self.publications.publish(self.revision(number))


def moved(number: int) -> dict[str, torch.Tensor]:
    return {name: value * (1 + 0.002 * number) for name, value in factors().items()}


def at_once(last: int, tier: str = "nvfp4-emulated") -> list[Publication]:
    """What is published of whole revisions, of which the controller makes the deltas."""
    maker, publications = publisher(tier=tier), Publications(Publish(snapshot_every=10))
    return [publications.publish(maker.build(number, moved(number))) for number in range(last + 1)]


@pytest.mark.parametrize("tier", ["nvfp4-emulated", "fp8"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_ranks_send_as_deltas_is_published_as_if_it_had_come_whole(world_size: int, tier: str) -> None:
    ranks = Ranks(world_size, tier)
    for expected in at_once(3, tier):
        number = expected.revision.manifest.revision
        found = ranks.publish(number)
        assert found.revision.manifest == expected.revision.manifest
        assert found.kind == expected.kind == ("delta" if number else "snapshot")
        whole = {name for shard in ranks.shards for name in shard.packed}
        assert whole.isdisjoint(expected.deltas)
        assert whole | expected.deltas.keys() == set(expected.revision.packed)
        for role in (EXPLORER, REGENERATOR):
            assert found.payload(role) == expected.payload(role)
            assert found.payload(role, full=True) == expected.payload(role, full=True)


def test_a_whole_revision_is_at_hand_after_a_row_of_deltas() -> None:
    ranks, expected = Ranks(), at_once(4)[-1]
    last = [ranks.publish(number) for number in range(5)][-1]
    assert all(torch.equal(tensor, expected.revision.packed[name]) for name, tensor in last.revision.packed.items())
    net = explorer()
    bound, digest = Receiver(net).apply(payload.read(last.payload(EXPLORER, full=True)))
    stated = last.revision.manifest.expected[EXPLORER]
    assert (bound, digest) == (stated.modules, stated.digest)


def test_a_completed_revision_keeps_none_of_those_before_it() -> None:
    ranks = Ranks()
    last = [ranks.publish(number) for number in range(3)][-1]
    assert getattr(last.revision.tensors, "_parent") is not None  # noqa: B009
    last.complete()
    assert getattr(last.revision.tensors, "_parent") is None  # noqa: B009


def test_a_snapshot_is_whole_though_the_ranks_send_what_differs_alone() -> None:
    ranks, whole = Ranks(snapshot_every=2), at_once(2)[-1].revision
    ranks.publish(0)
    ranks.publish(1)
    found = ranks.publish(2)
    assert found.kind == "snapshot"
    assert PACKED in ranks.shards[0].deltas
    expected = Publications(Publish()).publish(whole)
    assert found.payload(EXPLORER) == found.payload(EXPLORER, full=True) == expected.payload(EXPLORER)


def test_new_ranks_send_the_whole_and_it_still_travels_as_a_delta() -> None:
    ranks, expected = Ranks(), at_once(2)[-1]
    ranks.publish(0), ranks.publish(1)
    ranks.publishers = [publisher()]
    found = ranks.publish(2)
    assert set(ranks.shards[0].packed) == set(expected.revision.packed)
    assert found.payload(EXPLORER) == expected.payload(EXPLORER)


def test_a_revision_that_was_not_made_to_its_end_is_followed_by_a_whole_one() -> None:
    ranks = Ranks()
    ranks.publish(0)
    spoiled = moved(1) | {f"{QUERY}.lora_B": torch.full_like(factors()[f"{QUERY}.lora_B"], 1e30)}
    a = moved(1)[f"{QUERY}.lora_A"]
    spoiled[f"{QUERY}.lora_A"] = torch.full_like(a, 3e38)
    with pytest.raises(RunError, match=f"the merged weight of {QUERY} has NaN or Inf"):
        ranks.publishers[0].shard(1, spoiled, parent=0, keep=True)
    shard = ranks.publishers[0].shard(1, moved(1), parent=0, keep=True)
    assert not shard.deltas
    assert PACKED in shard.packed


@pytest.mark.parametrize("parent", [None, 0, 2])
def test_deltas_are_made_against_the_revision_that_the_controller_has_alone(parent: int | None) -> None:
    maker = publisher()
    for number in (0, 1):
        maker.shard(number, moved(number), keep=True)
    assert not maker.shard(2, moved(2), parent=parent, keep=True).deltas
    assert PACKED in maker.shard(3, moved(3), parent=2, keep=True).deltas


def test_what_is_made_beside_it_is_not_what_the_next_one_follows() -> None:
    maker = publisher()
    maker.shard(0, moved(0), keep=True)
    maker.shard(0, factors(seed=9), policy="ema", keep=True)
    maker.build(0, factors(seed=9))
    assert payload_of(maker, 1) == at_once(1)[-1].deltas[PACKED].tolist()


def payload_of(maker: Publisher, number: int) -> list[int]:
    found: list[int] = maker.shard(number, moved(number), parent=number - 1, keep=True).deltas[PACKED].tolist()
    return found


def test_deltas_without_the_revision_before_are_refused() -> None:
    ranks = Ranks()
    ranks.publish(0)
    ranks.revision(1)
    with pytest.raises(RunError, match="the shards of revision 1 are deltas, and the revision before is not there"):
        assemble(ranks.shards, LORA, moved(1))


def test_a_delta_that_does_not_lead_to_the_stated_weights_is_found_when_it_is_applied() -> None:
    ranks = Ranks()
    ranks.publish(0)
    ranks.revision(1)
    (shard,) = ranks.shards
    other = at_once(2)[-1].deltas[PACKED]
    wrong = dataclasses.replace(shard, deltas=shard.deltas | {PACKED: other})
    revision = assemble([wrong], LORA, moved(1), ranks.publications.parent(1))
    assert revision.factors.keys() == factors().keys()  # which need no delta
    with pytest.raises(Unusable, match=f"the delta of tensor '{PACKED}' does not lead to the checksum"):
        revision.packed[PACKED]


def test_modules_that_are_not_quantised_are_in_no_delta() -> None:
    ranks = Ranks()
    ranks.publish(0)
    ranks.publish(1)
    assert not any(OUT in name for shard in ranks.shards for name in (*shard.packed, *shard.deltas))
