"""However a revision reaches an explorer, and whatever befalls it on the way, the run's bytes are the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from actors.client import launch
from actors.cluster import wait
from actors.fleet.actor_factory import ActorClasses, ActorFactory
from actors.workers.base_packer import BasePacker
from actors.workers.explorer import Explorer
from solrl_ray import models
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.records import Attestation, PromptEmbedding, Receipt, Refusal
from solrl_ray.weight_sync.container import Buffer
from solrl_ray.weight_sync.publication import Publications
from solrl_ray.weight_sync.publish import Publisher, touched_linears
from tests.support.patience import patience, wait_until
from tests.support.small import digests, folder, small_config

pytestmark = pytest.mark.usefixtures("local_ray")


class LosesTheEnd(Explorer):
    """What it is sent arrives without its last bytes, at first."""

    def load_revision(self, payload: Buffer, probe: PromptEmbedding, full: bool) -> Receipt | Refusal:
        arrived = payload if full else np.asarray(payload)[:-7]
        return super().load_revision(arrived, probe, full)


class Miscopies(Explorer):
    """Its copy of one base weight is not what the checkpoint has, so that it merges to other bytes."""

    def start(self) -> Attestation:
        attestation = super().start()
        weight = next(iter(self._receiver._quantized_base.values()))
        weight.mul_(1.01)
        return attestation


def publications(config: Config) -> list[dict[str, float]]:
    lines = (folder(config) / "metrics.jsonl").read_text().splitlines()
    return [record["publication"] for line in lines if (record := json.loads(line))["event"] == "iteration"]


@pytest.mark.parametrize(
    ("mode", "role", "snapshots"),
    [
        ("packed", LosesTheEnd, [1, 0, 0]),
        ("lora", Miscopies, [0, 0, 0]),
    ],
)
def test_a_revision_that_cannot_be_taken_as_sent_is_sent_whole_and_counted(
    mode: str, role: type, snapshots: list[int], calm: Config, tmp_path: Path
) -> None:
    config = small_config(tmp_path, mode, f"publish.mode={mode}")
    launch.train(config, live=False, classes=ActorClasses(explorer=role))
    assert digests(config) == digests(calm)
    found = publications(config)
    assert [one["resyncs"] for one in found] == [1, 1, 1]
    assert [one["snapshot"] for one in found] == snapshots


def test_an_explorer_from_the_base_pack_proves_the_revision_of_one_from_the_checkpoint(tmp_path: Path) -> None:
    config = small_config(tmp_path, "pack", "publish.base=pack")
    first = BasePacker().pack(config, tmp_path)
    written = (tmp_path / "base" / "base.safetensors").stat().st_mtime_ns
    again = BasePacker().pack(config, tmp_path)
    assert np.array_equal(first, again)
    assert (tmp_path / "base" / "base.safetensors").stat().st_mtime_ns == written
    model = models.load(config.model, "cpu", components={"transformer", "text"})
    factors = {n: torch.full_like(f, 0.01) for n, f in _factors(model, config).items()}
    revision = Publisher.for_model(model.transformer, config).build(1, factors)
    content = Publications(config.publish).publish(revision).payload("explorer")
    probe = PromptEmbedding(prompt_id="p", tensors=model.encode(["a red circle"])[0], digest="p")
    explorers = Explorer("explorer", config, [ray.put(again)]), Explorer("explorer", config)
    attestations = [explorer.start() for explorer in explorers]
    assert attestations[0] == attestations[1]
    receipts = [explorer.load_revision(content, probe, True) for explorer in explorers]
    assert all(isinstance(receipt, Receipt) for receipt in receipts)
    first_proof, second_proof = (dataclasses.replace(receipt, seconds=0.0) for receipt in receipts)
    assert first_proof == second_proof
    assert first_proof.buffer_digest == revision.manifest.expected["explorer"].digest


def test_the_packer_ends_with_its_pack_from_which_later_explorers_start_as_well(tmp_path: Path) -> None:
    config = small_config(tmp_path, "pack", "publish.base=pack")
    factory = ActorFactory(config, tmp_path, ActorClasses())
    first = ray.get(factory.explorer("explorer-0").handle.start.remote(), timeout=patience())
    wait_until("the packer has ended", lambda: not named(factory, "packer"))
    later = factory.explorer("explorer-1").handle
    attestation = ray.get(later.start.remote(), timeout=patience())
    assert dataclasses.replace(attestation, worker=first.worker) == first
    assert not named(factory, "packer.1")
    factory.explore_with(config)
    ray.get(factory.explorer("explorer-2").handle.start.remote(), timeout=patience())
    assert len(list((tmp_path / "base").iterdir())) == 1


def test_an_explorer_without_a_base_pack_says_why_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "base").write_text("where the packer would make its folder")
    factory = ActorFactory(small_config(tmp_path, "pack", "publish.base=pack"), tmp_path, ActorClasses())
    with pytest.raises(RunError, match=r"^the base pack \(fleet.deadlines.start\) failed: NotADirectoryError: "):
        wait.get(factory.explorer("explorer-0").handle.node.remote(), what="a place", seconds=patience())


def named(factory: ActorFactory, name: str) -> bool:
    """Whether an actor of that name lives in the factory's namespace."""
    return {"name": name, "namespace": factory._namespace} in ray.util.list_named_actors(all_namespaces=True)


def _factors(model: models.DiffusionModel, config: Config) -> dict[str, torch.Tensor]:
    rank = config.model.lora.rank
    linears = touched_linears(model.transformer, config.model.lora.targets)
    return {
        f"{path}.{factor}": torch.empty(shape)
        for path, linear in linears.items()
        for factor, shape in (("lora_A", (rank, linear.in_features)), ("lora_B", (linear.out_features, rank)))
    }
