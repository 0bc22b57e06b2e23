"""However a revision reaches an explorer, and whatever befalls it on the way, the run's bytes are the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from actors.client import launch
from actors.fleet.actor_factory import ActorClasses
from actors.workers.explorer import Explorer
from solrl_ray.config.schema import Config
from solrl_ray.records import PromptEmbedding, Receipt, Refusal
from solrl_ray.weight_sync.payload import Payload
from tests.support.small import digests, folder, small_config

pytestmark = pytest.mark.usefixtures("local_ray")


class LosesTheEnd(Explorer):
    """What it is sent arrives without the end of a tensor, at first."""

    def load_revision(self, payload: Payload, probe: PromptEmbedding, full: bool) -> Receipt | Refusal:
        name, whole = next(iter(payload.tensors.items()))
        arrived = payload if full else replace(payload, tensors=payload.tensors | {name: whole[:-1]})
        return super().load_revision(arrived, probe, full)


def publications(config: Config) -> list[dict[str, float]]:
    lines = (folder(config) / "metrics.jsonl").read_text().splitlines()
    return [record["publication"] for line in lines if (record := json.loads(line))["event"] == "iteration"]


@pytest.mark.parametrize("mode", ["packed", "lora"])
def test_a_revision_that_cannot_be_taken_as_sent_is_sent_again_and_counted(
    mode: str, calm: Config, tmp_path: Path
) -> None:
    config = small_config(tmp_path, mode, f"publish.mode={mode}")
    launch.train(config, live=False, classes=ActorClasses(explorer=LosesTheEnd))
    assert digests(config) == digests(calm)
    found = publications(config)
    assert [one["resyncs"] for one in found] == [1, 1, 1]
    assert [one["packed"] for one in found] == [mode == "packed"] * 3
