"""A plan of a shipped model: the shapes are in the package, and nothing of the machine is needed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import model_shapes
import pytest

from solrl_ray.cli import preflight
from solrl_ray.config.loading import Sources, load
from solrl_ray.errors import UserError
from solrl_ray.models import shapes
from solrl_ray.planning import model_facts, outline
from tests.support.command_line import refusal
from tests.support.processes import python
from tests.support.small import CONFIGS

WITHOUT_SHAPES = {"chroma1_hd"}
"""Models whose plan reads the sizes from the checkpoint."""
MODELS = [path.stem for path in sorted((CONFIGS / "models").glob("*.yaml")) if path.stem not in WITHOUT_SHAPES]
PLAN = """
import sys
from solrl_ray.cli import main
status = main(sys.argv[1:])
assert "torch" not in sys.modules, "PyTorch was imported"
assert "diffusers" not in sys.modules, "diffusers was imported"
raise SystemExit(status)
"""


@pytest.mark.parametrize("name", MODELS)
def test_the_shapes_in_the_package_are_those_of_the_architecture(name: str) -> None:
    config = model_shapes.configuration(name)
    made, stored = model_shapes.made(name), shapes.shipped(config)
    assert stored is not None
    assert stored.family == config.family  # two of them may take one checkpoint
    assert dict(stored.linears) == dict(made.linears)
    assert list(stored.transformer) == [key for key in shapes.SETTINGS if key in made.transformer]
    assert all(made.transformer[key] == value for key, value in stored.transformer.items())
    assert (stored.factor, stored.blocks, stored.parameters) == (made.factor, made.blocks, made.parameters)


def test_the_facts_of_a_plan_are_those_of_the_checkpoint() -> None:
    config = load([CONFIGS / "demo.yaml"])
    found = preflight.check(preflight.Run(config, planned=True), "files")
    assert found.outlined
    assert found.facts == model_facts.model_facts(config)
    assert (len(found.train), len(found.heldout)) == (2048, 96)  # as the testbed was built


def test_blocks_with_separate_weights_for_texts_have_two_streams() -> None:
    found = {}
    for name in ("flux1_dev", "sd35_large", "z_image"):
        config = load([CONFIGS / "demo.yaml", CONFIGS / "models" / f"{name}.yaml"], ["rollout.explore.precision=bf16"])
        known = shapes.shipped(config.model)
        assert known is not None
        facts = outline.facts_of(config, Sources(), known, "bf16")
        found[name] = facts.streams, facts.stream_flops / (2 * facts.parameters * facts.tokens)
    assert {name: streams for name, (streams, _) in found.items()} == {"flux1_dev": 76, "sd35_large": 76, "z_image": 34}
    # A stream of a block has 1 / 76 of the weights, each of which meets half of the tokens.
    assert found["sd35_large"][1] == pytest.approx(1 / 76 / 2, rel=1e-3)
    assert found["z_image"][1] == pytest.approx(1 / 34, rel=1e-3)


def test_a_plan_needs_no_network_no_prompts_no_checkpoints_and_no_pytorch(tmp_path: Path) -> None:
    parts = ["models/flux1_dev", "strategies/two_stage", "methods/diffusion_nft", "rewards/hpsv2", "clusters/one_gpu"]
    arguments = ["plan", "-v", *(str(CONFIGS / f"{part}.yaml") for part in parts)]
    arguments += ["--set", "prompts={train: train.txt, heldout: heldout.txt}", "--gpu", "h200"]
    away = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    said = " ".join(python("-c", PLAN, *arguments, cwd=tmp_path, **away).split())
    assert "23.8 GB of transformer weights (bfloat16)" in said
    assert "note: before the run starts: prompts.train (--set) is 'train.txt', which is not on this machine" in said
    assert "model.path (" in said.partition("note: before the run starts: ")[2]
    assert "rewards.0.path (" in said
    assert "an iteration on 1 × NVIDIA H200" in said


@pytest.mark.parametrize(
    ("name", "chosen", "is_refused"), [("_i2v", [0], True), ("_i2v", [0, 1], False), ("", [0], False)]
)
def test_previews_of_the_given_picture_alone_are_refused(name: str, chosen: list[int], is_refused: bool) -> None:
    """All seeds of a prompt would have equal scores."""
    settings = "rollout.explore.precision=bf16", f"rollout.preview.latent_frames={chosen}"
    config = load([CONFIGS / "demo.yaml", CONFIGS / "models" / f"wan22_5b{name}.yaml"], settings)
    found = shapes.shipped(config.model)
    assert found is not None
    with pytest.raises(UserError, match=r"latent_frames .*\[0, 1\]") if is_refused else nullcontext():
        outline.facts_of(config, Sources(), found, "bf16")


def test_a_family_that_is_not_the_models_is_refused(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = "black-forest-labs/FLUX.1-dev"
    said = refusal(capsys, "plan", config_file, "--set", f"model.path={path}", "--set", "model.family=sd3")
    assert said.startswith(f"model.family is 'sd3' (--set), but {path} is of family 'flux'."), said


def test_a_plan_of_a_model_that_nobody_here_knows_is_refused_without_asking_the_network(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    said = refusal(capsys, "plan", config_file, "--set", "model.path=nobody/knows")
    assert said.startswith("model.path (--set) is 'nobody/knows', which is neither on this machine nor a model whose")
    assert "`hf download nobody/knows --include '*.json'`" in said
