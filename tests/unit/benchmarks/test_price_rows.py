"""Price list entries from what was measured, against milliseconds worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import price_rows
import pytest
from common import RESULTS, told

from solrl_ray.errors import UserError
from solrl_ray.planning.prices import price_list

SECONDS = {
    "naive": 16 * (10 * 0.3 + 2.0),
    "previews": 16 * (6 * 0.25 + 0.5),
    "regeneration": 20.0,
    "decode, score: naive": 16 * 2.0,
    "decode, score: previews": 16 * 0.5,
    "decode, score: regeneration": 8.0,
}
SIDES = {
    "eager": (0.0, (380, 420, 1600)),
    "compiled, activation memory 1": (1.0, (300, 320, 900)),
    "compiled, activation memory 0": (0.0, (300, 320, 1200)),
}


def test_measured_seconds_become_an_entry_that_a_price_list_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = {"pool": 16, "keep": 4, "steps": 10, "preview_steps": 6, "latent_frames": [0, 4, 8, 12]}
    settings = ["rollout.pool=16", "compile.cache=/elsewhere"]
    rollout = {"tier": "fp8", "settings": settings, "sampling": sampling, "seconds": SECONDS}
    sides = [
        {
            "side": name,
            "activation_memory": kept,
            "milliseconds": dict(zip(("base", "old", "default"), ms, strict=True)),
        }
        for name, (kept, ms) in SIDES.items()
    ]
    (tmp_path / "rollout_wan.json").write_text(json.dumps(rollout))
    (tmp_path / "learner_wan.json").write_text(json.dumps({"sides": sides}))

    price_rows.main(["wan", "--out", str(tmp_path)])
    (tmp_path / "card.yaml").write_text(f"gpu: a card\nfastest: fp8\nmodels:\n{capsys.readouterr().out}")
    (costs,) = price_list(str(tmp_path / "card.yaml")).models
    assert (costs.family, costs.shape.height, costs.shape.width, costs.shape.frames) == ("wan", 480, 832, 49)
    assert (costs.steps["bf16"].ms, costs.steps["fp8"].ms, costs.decode_and_reward.ms) == (300, 250, 2000)
    assert (costs.forward.ms, costs.backward_checkpointed.ms) == (400, 1600)  # type: ignore[union-attr]
    assert (costs.backward.ms, costs.backward.measured) == (1200, False)
    assert costs.compiled is not None
    assert [costs.compiled.at(share).ms for share in (1, 0.5, 0)] == [900, 1050, 1200]

    price_rows.main(["wan", "--out", str(tmp_path), "--on", "an H100"])
    printed = capsys.readouterr().out
    assert "measured: true" not in printed
    assert 'source: "learner_wan.json, on an H100"' in printed


def test_an_eager_pass_that_keeps_all_is_the_price_of_one_that_keeps_all() -> None:
    found = price_rows.passes(price_rows.read("learner", "sd3", RESULTS))
    assert found["backward"] == (276.24, True)
    assert "backward_checkpointed" not in found
    assert found["forward"][0] == pytest.approx(103.585)  # of 98.48 and 108.69
    again = price_rows.passes(price_rows.read("learner", "flux", RESULTS))
    assert (again["backward"][1], again["backward_checkpointed"][1]) == (False, True)


def test_what_is_missing_is_said_with_the_command_that_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, told():
        price_rows.main(["wan", "--out", str(tmp_path)])
    assert ended.value.code == 2
    command = f"`python benchmarks/rollout.py wan --out {tmp_path}`"
    assert capsys.readouterr().err == f"error: {tmp_path}/rollout_wan.json is not there; {command} writes it.\n"
    with pytest.raises(
        UserError, match=r"rollout_flux\.json has no `sampling`.*; `python benchmarks/rollout\.py flux "
    ):
        price_rows.read("rollout", "flux", RESULTS)
    side = r"learner_sana\.json has no side `compiled, activation memory 0`; `.*learner\.py sana --memory 1 0\.5 0 "
    with pytest.raises(UserError, match=side):
        price_rows.read("learner", "sana", RESULTS)
