"""Which models train on which card: the table of the README, and what `solrl doctor` says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import fits
import pytest

from solrl_ray.cli.doctor import models_on
from solrl_ray.plan.fitting import Card
from tests.support.command_line import solrl

README = Path(__file__).parents[3] / "README.md"


@pytest.fixture(scope="module")
def table() -> list[str]:
    return fits.table()


def test_the_readme_has_the_table_that_the_plan_makes(table: list[str]) -> None:
    assert "\n".join(table) in README.read_text()


def test_a_doctor_names_the_models_of_a_card_and_which_offload() -> None:
    found = models_on(Card(name="cuda:0", memory=48.3e9), "fp8")
    assert (found.part, found.what, found.state) == ("cuda:0", "models", "ok")
    fitting = "flux1_dev (offload), flux1_kontext_dev (offload), flux2_klein_base_4b, sana_1600m, "
    assert f"estimated: {fitting}" in found.detail
    assert "qwen_image" not in found.detail
    assert "pickscore one_gpu_48gb --set" in found.detail


@pytest.mark.parametrize(("memory", "tier", "gpu"), [(48.3e9, "fp8", "l40s"), (150.7e9, "fp8", "h200")])
def test_the_command_that_a_doctor_names_works_as_it_is_printed(
    memory: float, tier: str, gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    detail = models_on(Card(name="cuda:0", memory=memory), tier).detail
    command = shlex.split(detail.split("`")[1])
    assert command[:2] == ["solrl", "plan"]
    assert solrl(*command[1:], "--gpu", gpu) == 0
    model, offload = re.findall(r"estimated: (\w+)( \(offload\))?", detail)[0]
    assert command[2] == model
    assert f"fleet.offload null is {'true' if offload else 'false'}: " in " ".join(capsys.readouterr().out.split())
    assert solrl(*command[1:]) == 0


def test_a_doctor_whom_no_model_fits_says_so_and_names_a_command_that_works() -> None:
    detail = models_on(Card(name="cuda:0", memory=12e9), "bf16").detail
    assert detail.startswith("none fits; `solrl plan flux1_dev ")
    assert solrl(*shlex.split(detail.split("`")[1])[1:]) == 0
