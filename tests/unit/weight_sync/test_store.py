"""Revisions on the disk: they are read back bit for bit, never change, and are refused if they are damaged."""

from pathlib import Path

import pytest
import torch

from solrl_ray.errors import RunError
from solrl_ray.weight_sync import payload
from solrl_ray.weight_sync.publish import assemble
from solrl_ray.weight_sync.store import RevisionStore
from tests.support.bad_disk import make_unreadable
from tests.support.weight_sync import LORA, OUT, QUERY, factors, flipped, model, publisher


def test_the_stored_revision_is_its_factors_and_the_checksums_of_all_its_weights(tmp_path: Path) -> None:
    store, revision = RevisionStore(tmp_path / "revisions"), publisher().build(20, factors())
    file = store.save(revision)
    assert [path.name for path in file.parent.iterdir()] == ["revision-000020.safetensors"]
    found = store.load(20)
    assert found.manifest == revision.manifest
    assert found.manifest.tensors.keys() >= {f"{QUERY}.packed", f"{QUERY}.scales"}
    assert found.tensors.keys() == factors().keys()
    assert all(torch.equal(tensor, factors()[name]) for name, tensor in found.tensors.items())
    assert store.revisions() == [20]


def test_a_run_that_is_resumed_with_explorers_of_another_tier_stores_its_revision_anew(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path)
    store.save(publisher().build(3, factors()))
    elsewhere = publisher(tier="fp8").build(3, factors())
    store.save(elsewhere)
    assert store.load(3).manifest == elsewhere.manifest
    with pytest.raises(RunError, match="holds a different revision-000003: a revision never changes"):
        store.save(publisher().build(3, factors(scale=0.2)))


def test_a_stored_revision_never_changes(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path)
    file = store.save(publisher().build(1, factors()))
    written = file.stat().st_mtime_ns
    unpacked = assemble([publisher().shard(1, factors(), pack=False)], LORA, factors())  # explorers are all on cards
    store.save(unpacked)
    assert file.stat().st_mtime_ns == written
    with pytest.raises(RunError, match="a revision never changes"):
        store.save(publisher().build(1, factors(seed=99)))
    other_base = model()
    other_base.get_parameter(f"{QUERY}.weight").mul_(0.5)
    with pytest.raises(RunError, match="a revision never changes"):
        store.save(publisher(other_base).build(1, factors()))


def test_an_empty_store_has_no_revision(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path / "nowhere")
    assert store.revisions() == []
    with pytest.raises(RunError, match=r"revision 3 is not in .*, which holds \[\]"):
        store.load(3)


def test_half_written_files_are_ignored(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path)
    store.save(publisher().build(1, factors()))
    (tmp_path / ".revision-000003.safetensors.7.partial").write_bytes(b"half")
    assert store.revisions() == [1]


def test_a_damaged_revision_is_refused_by_name_and_no_obstacle_to_a_run_that_makes_it_again(tmp_path: Path) -> None:
    store, revision = RevisionStore(tmp_path), publisher().build(1, factors())
    file = store.save(revision)
    content = file.read_bytes()
    other = publisher().build(2, factors())
    name = f"{OUT}.lora_A"
    for damaged, said in (
        (content[:-5], "is damaged"),
        (flipped(content, name), f"tensor '{name}' of the revision's payload does not have the checksum"),
        (payload.encode(other.manifest, other.factors), "does not hold the factors of revision 1"),
        (payload.encode(revision.manifest, {}), "does not hold the factors of revision 1"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(RunError, match=said):
            store.load(1)
        store.save(revision)
        assert file.read_bytes() == content


def test_a_revision_that_the_disk_does_not_give_is_no_obstacle_to_a_run_that_makes_it_again(tmp_path: Path) -> None:
    store, revision = RevisionStore(tmp_path), publisher().build(1, factors())
    make_unreadable(store.save(revision))
    store.save(revision)
    assert store.load(1).manifest == revision.manifest


def test_the_newest_revisions_are_kept(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path)
    for number in range(4):
        store.save(publisher().build(number, factors()))
        store.prune(keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "revision-000002.safetensors",
        "revision-000003.safetensors",
    ]
