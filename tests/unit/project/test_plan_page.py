"""docs/guides/planning.md explains each line that a plan prints, under the name that is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.command_line import solrl

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "planning.md").read_text()
PLANS = [
    ["flux1_dev_80gb", "--gpu", "h100-80"],
    ["sana_1600m_80gb", "--gpu", "rtx4090", "--set", "fidelity={audit_prompts: 4, floor: 0.6, fallback: [{steps: 8}]}"],
    ["flux1_dev", "direct", "diffusion_nft", "pickscore", "one_gpu", "--set", "prompts={train: t, heldout: h}"],
    ["demo"],
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(plan[:2]))
def test_the_page_explains_each_line_of_a_plan(
    plan: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert solrl("plan", *plan) == 0
    printed = re.findall(r"^(\w+(?: \w+)*)  +\S", capsys.readouterr().out, re.MULTILINE)
    assert {"run", "rewards", "learn"} <= set(printed)
    assert [name for name in printed if f"`{name}`" not in PAGE] == []
