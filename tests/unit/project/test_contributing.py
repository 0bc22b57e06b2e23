"""CONTRIBUTING.md: its reward, its model and its objective, added to a copy of the code as the page says, work."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import output_of, python

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
CHECKS = """
import torch
from solrl_ray import models, objectives, rewards
from solrl_ray.config.loading import load
from solrl_ray.planning.update import trained_timesteps
from solrl_ray.learning.engine import free_port, leave_process_group, process_group
from solrl_ray.learning.learner import Learner
from solrl_ray.objectives.base import MicroBatch, Velocities
from solrl_ray.records import PromptEmbedding, SampleGroup

here = ["model.family=flux_t5", "model.path=solrl_ray/testbed/assets/pipeline"]
config = load(["configs/demo.yaml", "configs/rewards/redness.yaml"], here)
rewards.check(config.rewards, config.model.shapes, str)
images = torch.zeros(2, 3, 4, 4)
images[0, 0] = 1
assert rewards.load(config.rewards, "cpu").score(images, ["a", "b"]).tolist() == [1, 0]

stock = load(["configs/demo.yaml"])
[without] = models.load(config.model, "cpu", components=["text"]).encode(["a red square"])
[usual] = models.load(stock.model, "cpu", components=["text"]).encode(["a red square"])
assert torch.equal(without["prompt_embeds"], usual["prompt_embeds"])
assert usual["pooled_prompt_embeds"].any() and not without["pooled_prompt_embeds"].any()

config = load(["configs/demo.yaml"], ["objective={kind: weighted, temperature: 0.5, timestep_fraction: 0.4}"])
weighted = objectives.load(config, torch.linspace(1, 0, 11, dtype=torch.float64))
x0 = torch.ones(2, 3)
batch = MicroBatch(prompt_ids=("p", "p"), indices=(0, 1), x0=x0, weights=torch.ones(2))
passes = weighted.passes(batch, torch.device("cpu"), 0)
assert len(passes) == trained_timesteps(config) == 4
v = passes[0].eps - x0 + 2
loss = weighted.loss(passes[0], Velocities(theta=v, old=v), torch.tensor([0.0, 0.5], dtype=torch.float64))
torch.testing.assert_close(loss.total, torch.tensor([4.0, 4 * 2.718281828]))

# One update of the new family with the new objective.
config = load(["configs/demo.yaml"], ["objective={kind: weighted, timestep_fraction: 0.2}", *here])
model = models.load(config.model, "cpu", components=["text", "transformer"])
[tensors] = model.encode(["a red square"])
process_group(0, 1, "127.0.0.1", free_port(), device=torch.device("cpu"), timeout=60, one_host=True)
learner = Learner(config, model, 0, 1)
made = {"iteration": 0, "revision": 0, "prompt_id": "p", "indices": (4, 7), "rewards": (0.0, 1.0)}
group = SampleGroup(**made, latents=torch.ones(2, *model.latent_shape))
before = learner.factors("default")
metrics = learner.update(0, [group], {"p": PromptEmbedding(prompt_id="p", tensors=tensors, digest="d")})
assert metrics.passes == trained_timesteps(config) > 0 == metrics.kl
moved = learner.factors("old")  # a copy of the trained policy
assert all(not torch.equal(moved[name], before[name]) for name in before if name.endswith("lora_B"))
learner.close()
leave_process_group()

from solrl_ray.cli import main

changes = ["objective.kind=weighted", *here]
settings = [word for change in changes for word in ("--set", change)]
assert main(["plan", "-v", "demo", "redness", *settings]) == 0
assert main(["list"]) == 0
"""
"""All in one process: it takes seconds to import what they need."""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code with all that the page adds to it, unless a reader of the page has added it already."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("solrl_ray", "actors", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    files = re.findall(r"^```\w+ title=\"([^\"]+)\"\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    patches = re.findall(r"^(--- a/.*?)(?=^---|^```)", PAGE, re.DOTALL | re.MULTILINE)
    assert len(patches) == len([name for name, _ in files if name.endswith(".py")]) == 3  # one file each, and its line
    for name, content in files:
        assert not (copy / name).exists() or (copy / name).read_text() == content
        (copy / name).write_text(content)
    for number, patch in enumerate(patches):
        file = copy / f"{number}.patch"
        file.write_text(patch)
        command = ["git", "apply", "--recount", file.name]
        there = subprocess.run([*command, "--reverse", "--check"], cwd=copy, capture_output=True, check=False)
        if there.returncode == 0:
            continue
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"a diff of CONTRIBUTING.md does not fit the code any more: {done.stderr}{patch}"
    return copy


def test_the_examples_compute_what_they_say_a_run_is_planned_with_them_and_the_model_is_listed(changed: Path) -> None:
    said = python("-c", CHECKS, cwd=changed, PYTHONPATH=str(changed))
    assert "1 optimiser step with weighted" in " ".join(said.split())
    assert "A FLUX.1 that was distilled without CLIP" in said


def test_the_examples_are_formatted_and_linted_as_the_code_is(changed: Path) -> None:
    ruff = str(Path(sys.executable).parent / "ruff")
    settings = ["--config", str(ROOT / "pyproject.toml")]
    for command in (["check", *settings], ["format", "--check", *settings]):
        output_of(ruff, *command, "solrl_ray", cwd=changed)
