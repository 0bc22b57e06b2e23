"""Every model × strategy × method × reward of configs/ makes a valid run, but for what is refused by design."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from solrl_ray.cli import catalogue, main
from solrl_ray.cli.catalogue import PROMPTS, CatalogueEntry
from solrl_ray.config import checks
from solrl_ray.config.loading import load, load_with_sources
from solrl_ray.config.strategies import is_one_stage, pool_sampling, warnings
from solrl_ray.errors import UserError
from solrl_ray.records import Pruning
from tests.support.sentences import names

CONFIGS = Path(__file__).parents[3] / "configs"
PARTS = catalogue.read()

ACKNOWLEDGED = "rollout.accept_quantized_training=true"


def compositions() -> Iterator[tuple[CatalogueEntry, ...]]:
    """Every model × strategy × method × reward; a part that includes others is a recipe of its own."""
    for chosen in itertools.product(*(PARTS[kind] for kind in catalogue.KINDS)):
        if not any(part.whole for part in chosen):
            yield chosen


def refusal(parts: tuple[CatalogueEntry, ...], *overrides: str) -> str:
    """Why it cannot be run; empty if it can, as far as keys and values go."""
    try:
        loaded = load_with_sources([part.path for part in parts], [*PROMPTS, *overrides])
        checks.check(loaded.config, loaded.sources)
    except UserError as error:
        return str(error)
    return ""


def test_every_composition_is_valid_but_rewards_of_edits_without_references() -> None:
    found = {parts: reason for parts in compositions() if (reason := refusal(parts, ACKNOWLEDGED))}
    edits = [parts for parts in found if parts[3].path.stem in ("clip_edit", "judge_edit")]
    assert not any("model.references" not in found[parts] for parts in edits)
    assert len({parts[3] for parts in edits}) == 2
    assert not {parts[0].path.stem for parts in edits} & {"flux1_kontext_dev", "qwen_image_edit"}
    wrong = {parts: reason for parts, reason in found.items() if parts not in edits}
    assert not wrong, "\n".join(f"{[str(part.path) for part in parts]}: {wrong[parts]}" for parts in wrong)


def test_each_strategy_is_there_once_with_its_sizes() -> None:
    found = {}
    for parts in (parts for parts in compositions() if parts[2].path.stem == "diffusion_nft"):
        config = load([part.path for part in parts], [*PROMPTS, ACKNOWLEDGED])
        rollout, pool = config.rollout, pool_sampling(config)
        found[rollout.strategy] = (rollout.prompts, rollout.pool, rollout.keep, pool.steps, is_one_stage(config))
        pruned = Pruning(after=2, keep=12) if rollout.strategy == "two_stage" else None
        assert (pool.pruning, pool.micro_batch, pool.padding) == (pruned, 12 if pruned else 24, 0)
        assert (pool.tier in ("bf16", "float32")) == (rollout.strategy in ("direct", "scaled"))
        said = warnings(config)
        assert any("quantised samples" in words for words in said) == (rollout.strategy == "quantized")
        assert any("digests" in words for words in said) == (config.rewards[0].kind == "judge")
    assert found == {
        "direct": (48, 24, 24, 10, True),
        "scaled": (48, 96, 24, 10, True),
        "quantized": (48, 96, 24, 10, True),
        "two_stage": (6, 24, 4, 6, False),
    }


@pytest.mark.parametrize("part", ["one_gpu_24gb", "one_gpu_48gb", "one_gpu_80gb"])
def test_on_no_card_are_pruned_previews_padded(part: str) -> None:
    files = [CONFIGS / "runs" / "flux1_dev_eight_gpus.yaml", CONFIGS / "clusters" / f"{part}.yaml"]
    assert pool_sampling(load(files)).padding == 0


def test_a_strategy_of_one_stage_replaces_a_pruned_one() -> None:
    for strategy in ("direct", "scaled"):
        files = [CONFIGS / "runs" / "flux1_dev_eight_gpus.yaml", CONFIGS / "strategies" / f"{strategy}.yaml"]
        config = load(files)
        checks.check(config)
        assert (pool_sampling(config).pruning, pool_sampling(config).micro_batch) == (None, 24)


def test_a_pool_that_is_too_small_to_be_pruned_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--set", "rollout.pool=12", "--set", "rollout.keep=4", "--set", "rollout.explore.micro_batch=12"]
    assert main(["plan", "flux1_dev_80gb", *small]) == 2
    said = capsys.readouterr().err
    assert names(said, "error: rollout.preview.prune.keep", "12 two_stage.yaml rollout.pool rollout.preview.prune=null")
    assert main(["plan", "-v", "flux1_dev_80gb", *small, "--set", "rollout.preview.prune=null"]) == 0
    assert "3 units of 12, 18 forwards" in " ".join(capsys.readouterr().out.split())


def test_a_one_stage_strategy_does_not_ask_for_preview_sizes(tmp_path: Path) -> None:
    file = tmp_path / "scaled.yaml"
    file.write_text("rollout: {strategy: scaled, explore: {micro_batch: 7}}\n")
    assert main(["plan", str(CONFIGS / "demo.yaml"), str(file)]) == 0


def test_the_list_names_parts_checkpoints_and_how_they_compose(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for part in (part for parts in PARTS.values() for part in parts):
        assert f"  {part.path.stem}" in lines
        assert part.title, part.path
    assert "      builtin:testbed/pipeline" in lines
    assert "        hf download xswu/HPSv2 HPS_v2.1_compressed.pt" in lines
    assert "      xswu/HPSv2" in lines
    commands = {part.path.stem: part.downloads for part in PARTS["models"]}
    assert commands.pop("testbed") == ()
    assert commands["flux1_dev"] == ("hf download black-forest-labs/FLUX.1-dev",)
    for (command,) in commands.values():
        assert f"        {command}" in lines
    text = " ".join(" ".join(lines).split())
    assert "known to be bad; starts only with `--set rollout.accept_quantized_training=true`" in text
    command = text.split("then your YAML files: solrl ", 1)[1].replace(" \\", "")
    command = command.replace("TRAIN.txt", "builtin:testbed/prompts/train.txt")
    assert main([*command.replace("HELDOUT.txt", "builtin:testbed/prompts/heldout.txt").split(), "--dry-run"]) == 2
    # All of its parts go together: only this machine lacks GPUs.
    assert capsys.readouterr().err.startswith("error: fleet.explorers.num_gpus is 1 (")


def test_the_list_as_json_has_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {kind: [entry["name"] for entry in entries] for kind, entries in found.items()} == {
        kind: [part.path.stem for part in parts] for kind, parts in PARTS.items()
    }
    [flux] = [entry for entry in found["models"] if entry["name"] == "flux1_dev"]
    assert flux["checkpoints"] == ["black-forest-labs/FLUX.1-dev"]
