"""The whole system on a real Ray: what it leaves behind, and that the fleet does not change it."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path

import pytest
from ray.util.placement_group import placement_group_table

from actors.client import launch
from actors.cluster.names import namespace
from actors.fleet.actor_factory import ActorClasses
from actors.workers.explorer import Explorer
from solrl_ray.config.schema import Config
from solrl_ray.records import Prompt, PromptEmbedding, UnitResult, WorkUnit
from solrl_ray.report.data import read_run
from tests.support.documents import run_folder_entries
from tests.support.patience import patience
from tests.support.small import digests, folder, small_config, summary
from tests.support.spans import ended, read_spans

pytestmark = pytest.mark.usefixtures("local_ray")


def test_a_run_leaves_everything_a_user_takes_home(calm: Config) -> None:
    root = folder(calm)
    for name in (
        "format",
        "config.yaml",
        "prompts.json",
        "metrics.jsonl",
        "attestations.json",
        "summary.json",
        "report.html",
        "lora/pytorch_lora_weights.safetensors",
        "checkpoints/iteration-000003/state.json",
        "journal/iteration-000002.jsonl",
        "evaluations/updates-000000-base",
        "evaluations/updates-000000-real",
        "evaluations/updates-000003-ema",
    ):
        assert (root / name).exists(), name
    assert list((root / "tensorboard").glob("events.out.tfevents.*"))
    assert {path.name for path in root.iterdir()} <= run_folder_entries(), "docs/reference/run-folder.md lists them"
    found = summary(calm)
    assert found["iterations"] == 3
    assert found["heldout_prompts"] == 2
    assert found["candidates"] == 3 * 3 * 8
    assert found["samples"] == 3 * 3 * 4


def test_the_attestation_says_that_previews_are_emulated(calm: Config) -> None:
    attested = {a["worker"]: a for a in json.loads((folder(calm) / "attestations.json").read_text())}
    assert attested["explorer-0"]["tier"] == "nvfp4-emulated"
    assert attested["explorer-0"]["quantized_layers"] > 0
    assert attested["regenerator-0"]["tier"] == "float32"


def test_a_prompt_is_regenerated_while_others_are_still_explored(calm: Config) -> None:
    units = [span for span in read_spans(folder(calm)) if span.kind == "unit"]
    explored = {span.iteration: ended(span) for span in units if span.stage == "explore"}  # of each its last
    assert any(span.started < explored[span.iteration] for span in units if span.stage == "regenerate")


class Troubled(Explorer):
    """The second one's first answers are nonsense: rewards that are NaN, and an answer to another unit. In iteration 2
    one of them hangs."""

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        result = super().explore(unit, prompt, embedding)
        if unit.iteration == 2 and self._first("hung"):
            time.sleep(3600.0)
        if self._name == "explorer-1" and self._first("nan"):
            return dataclasses.replace(result, rewards=(float("nan"),) * len(result.rewards))
        if self._name == "explorer-1" and self._first("other"):
            return dataclasses.replace(result, unit=dataclasses.replace(unit, indices=unit.indices[::-1]))
        return result

    def _first(self, name: str) -> bool:
        """Whether nobody was here before."""
        try:
            Path(self._config.run.root, name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


SAID = (
    r"(?s)is repeated; strike 1 of 2 for explorer-1: .*is repeated; strike 2 of 2 for explorer-1: ",
    r"refused a result of explorer-1: ",
    r"explorer-1 was given explore \(.*\) of revision \d and answered explore \(.*\) of revision \d",
    r"explorer-1 was lost \(strike 2: .*\); explorer-1\.1 takes its place",
    r"explorer-\d(\.1)? was lost \(explore \(iteration 3, .*\) passed its deadline of .* s\); explorer-",
)


def test_three_explorers_of_which_one_answers_nonsense_and_one_hangs_learn_the_same_bytes_as_one(
    calm: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deadline = f"fleet.deadlines.explore={patience(20.0)}"
    config = small_config(
        tmp_path, "three", "fleet.explorers.count=3", "fleet.regenerators.count=2", deadline, "fleet.strikes=2"
    )
    launch.train(config, live=False, classes=ActorClasses(explorer=Troubled))
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"nan", "other", "hung"}
    assert digests(config) == digests(calm)
    assert summary(config)["requeued_units"] >= 2
    assert [record.differing_results for record in read_run(folder(config)).iterations] == [0, 0, 0]
    said = capsys.readouterr().out
    assert [sentence for sentence in SAID if not re.search(sentence, said)] == []


class Poisoned(Explorer):
    """Its rewards are ten times too high.

    The ranking stays; were a preview's reward learned from, training would change. Its latents and images it does not
    even return.
    """

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        result = super().explore(unit, prompt, embedding)
        return dataclasses.replace(result, rewards=tuple(10.0 * reward for reward in result.rewards))


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run whose explorers are `Poisoned`; on this process's Ray, as `calm` need not be."""
    config = small_config(tmp_path_factory.mktemp("poisoned"), "poisoned")
    launch.train(config, live=False, classes=ActorClasses(explorer=Poisoned))
    return config


def test_rewards_of_previews_never_reach_the_objective(calm: Config, poisoned: Config) -> None:
    assert summary(poisoned)["lora_digest"] == summary(calm)["lora_digest"]
    assert summary(poisoned)["selection_digest"] != summary(calm)["selection_digest"]  # it contains proxy rewards


def test_a_run_that_has_ended_leaves_nothing_reserved(poisoned: Config) -> None:
    run = namespace(folder(poisoned))
    places = [place for place in placement_group_table().values() if place["name"].startswith(run)]
    assert [place["state"] for place in places] == ["REMOVED"]
