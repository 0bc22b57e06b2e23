"""Revisions on the disk: they are read back bit for bit, never change, and are refused if they are damaged."""

from pathlib import Path

import pytest
import torch

from solrl_ray.config.schema import Publish
from solrl_ray.errors import RunError
from solrl_ray.weight_sync import payload
from solrl_ray.weight_sync.payload import Revision
from solrl_ray.weight_sync.publication import EXPLORER, Publications
from solrl_ray.weight_sync.publish import assemble
from solrl_ray.weight_sync.receive import Receiver
from solrl_ray.weight_sync.store import RevisionStore
from tests.support.weight_sync import (
    LORA,
    OUT,
    QUERY,
    explorer,
    factors,
    flipped,
    moving,
    publication,
    published,
    publisher,
    same,
)


def test_a_run_that_is_resumed_with_explorers_of_another_tier_stores_its_revision_anew(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path)
    store.save(publication(publisher().build(3, factors())))
    elsewhere = publisher(tier="fp8").build(3, factors())
    store.save(publication(elsewhere))
    assert same(store.load(3), elsewhere)
    with pytest.raises(RunError, match="holds a different revision-000003: a revision never changes"):
        store.save(publication(publisher().build(3, factors(scale=0.2))))


@pytest.mark.parametrize("name", ["manifest.json", "packed.safetensors"])
def test_a_damaged_revision_is_no_obstacle_to_a_run_that_makes_it_again(tmp_path: Path, name: str) -> None:
    store, chain = RevisionStore(tmp_path), published(range(4))
    for one in chain[:3]:
        store.save(one)
    for damaged in (tmp_path / "revision-000001", tmp_path / "revision-000002"):
        (damaged / name).write_bytes((damaged / name).read_bytes()[:50])
    store.save(publication(chain[2].revision))  # as a resumed run publishes it: whole
    store.save(chain[3])
    store.prune(keep=3)
    assert same(store.load(3), chain[3].revision)


def test_a_stored_revision_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    store, revision = RevisionStore(tmp_path / "revisions"), publisher().build(20, factors())
    folder = store.save(publication(revision))
    assert folder.name == "revision-000020"
    assert sorted(path.name for path in folder.iterdir()) == [
        "factors.safetensors",
        "manifest.json",
        "packed.safetensors",
    ]
    assert same(store.load(20), revision)
    assert store.revisions()[-1] == 20
    assert [path.name for path in folder.parent.iterdir()] == ["revision-000020"]


def unpacked(number: int) -> Revision:
    """As learners make it whose explorers are all on their cards."""
    return assemble([publisher().shard(number, moving(number), pack=False)], LORA, moving(number))


def test_a_revision_without_packed_weights_is_read_back_and_the_next_one_is_no_delta_against_it(tmp_path: Path) -> None:
    store, publications = RevisionStore(tmp_path), Publications(Publish())
    alone, following = publications.publish(unpacked(1)), publications.publish(publisher().build(2, moving(2)))
    assert (alone.kind, following.kind) == ("factors", "snapshot")
    assert (alone.is_packed, following.is_packed) == (False, True)
    for one in (alone, following):
        store.save(one)
        assert same(store.load(one.revision.manifest.revision), one.revision)
    assert store.load(1).packed_names == []


def test_a_run_that_is_resumed_with_explorers_of_no_card_stores_its_revision_packed(tmp_path: Path) -> None:
    store, publications = RevisionStore(tmp_path), Publications(Publish())
    store.save(publication(unpacked(1)))
    resumed = [publications.publish(publisher().build(number, moving(number))) for number in (1, 2)]
    assert [one.kind for one in resumed] == ["snapshot", "delta"]
    for one in resumed:
        store.save(one)
    assert same(store.load(2), resumed[1].revision)
    store.save(publication(unpacked(2)))  # resumed again, as before: what others build on stays
    assert same(store.load(2), resumed[1].revision)


def test_stored_deltas_are_read_back_from_their_snapshot_on(tmp_path: Path) -> None:
    store, chain = RevisionStore(tmp_path), published(range(7))
    for one in chain:
        store.save(one)
    for one in chain:
        assert same(store.load(one.revision.manifest.revision), one.revision)


def test_an_empty_store_has_no_latest_revision(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path / "nowhere")
    assert store.revisions() == []
    with pytest.raises(RunError, match=r"revision 3 is not in .*, which holds \[\]"):
        store.load(3)


def test_half_written_folders_are_ignored_and_written_over(tmp_path: Path) -> None:
    store, revision = RevisionStore(tmp_path), publisher().build(2, factors())
    store.save(publication(publisher().build(1, factors())))
    (tmp_path / "revision-000002").mkdir()
    (tmp_path / "revision-000002" / "factors.safetensors").write_bytes(b"half")
    (tmp_path / ".revision-000003.partial").mkdir()
    assert store.revisions() == [1]
    store.save(publication(revision))
    assert same(store.load(2), revision)


def test_a_stored_revision_never_changes(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path)
    store.save(publication(publisher().build(1, factors())))
    written = (tmp_path / "revision-000001" / "packed.safetensors").stat().st_mtime_ns
    store.save(publication(publisher().build(1, factors())))
    assert (tmp_path / "revision-000001" / "packed.safetensors").stat().st_mtime_ns == written
    with pytest.raises(RunError, match="a revision never changes"):
        store.save(publication(publisher().build(1, factors(seed=99))))


def test_a_damaged_store_is_refused_by_name(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path)
    folder = store.save(publication(publisher().build(1, factors())))
    file = folder / "packed.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-5])
    with pytest.raises(RunError, match=r"packed\.safetensors is damaged"):
        store.load(1)
    file.write_bytes(flipped(content, f"{QUERY}.packed"))
    with pytest.raises(RunError, match=r"tensor 'attn\.to_q\.packed' of the revision's payload does not have the chec"):
        store.load(1)
    other = publication(publisher().build(1, factors(seed=9)))
    file.write_bytes(payload.encode(other.revision.manifest, other.whole()))
    with pytest.raises(RunError, match="of another revision than the manifest beside it"):
        store.load(1)


def test_a_delta_without_its_parent_is_not_stored_and_not_read(tmp_path: Path) -> None:
    store, chain = RevisionStore(tmp_path), published(range(3))
    store.save(chain[0])
    with pytest.raises(RunError, match=r"revision-000002 is a delta, but .* does not hold revision 1"):
        store.save(chain[2])
    store.save(chain[1])
    store.save(chain[2])
    (tmp_path / "revision-000001" / "manifest.json").unlink()
    with pytest.raises(RunError, match=r"revision 1 is not in .*, which holds \[0, 2\]"):
        store.load(2)


def test_the_newest_revisions_are_kept_with_what_their_deltas_need(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path)
    kept = []
    for one in published(range(10)):  # snapshots are 0, 4, 8
        store.save(one)
        store.prune(keep=2)
        kept.append(store.revisions())
    assert kept[3] == [0, 1, 2, 3]
    assert kept[4] == [0, 1, 2, 3, 4]
    assert kept[5] == [4, 5]
    assert kept[9] == [8, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["revision-000008", "revision-000009"]
    assert same(store.load(9), published(range(10))[9].revision)


def test_what_is_not_finite_is_not_published_and_the_revision_before_stays(tmp_path: Path) -> None:
    store, maker = RevisionStore(tmp_path), publisher()
    net = explorer()
    good = publication(maker.build(1, factors()))
    store.save(good)
    Receiver(net).apply(payload.read(good.payload(EXPLORER)))
    bad = factors()
    bad[f"{OUT}.lora_A"][1, 1] = torch.inf
    with pytest.raises(RunError, match=r"factor attn\.to_out\.0\.lora_A has NaN or Inf: the revision is not published"):
        maker.build(2, bad)
    assert store.revisions()[-1] == 1
    assert torch.equal(net["attn"].to_q.packed, store.load(1).tensors[f"{QUERY}.packed"])
