"""The learner's state on disk: whole or refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from solrl_ray.errors import RunError, UserError
from solrl_ray.learning.state import LearnerState
from tests.support.bad_disk import make_unreadable


def a_state(updates: int = 3) -> LearnerState:
    generator = torch.Generator().manual_seed(updates)

    def factors() -> dict[str, torch.Tensor]:
        return {
            "block.lora_A": torch.randn(2, 5, generator=generator),
            "block.lora_B": torch.randn(3, 2, generator=generator),
        }

    return LearnerState(
        updates=updates,
        steps=2 * updates,
        default=factors(),
        old=factors(),
        ema=factors(),
        exp_avg=factors(),
        exp_avg_sq=factors(),
        rollbacks=1,
    )


def assert_equal(left: LearnerState, right: LearnerState) -> None:
    counts = ("updates", "steps", "rollbacks")
    assert [getattr(left, name) for name in counts] == [getattr(right, name) for name in counts]
    for part in (f.name for f in fields(LearnerState) if f.name not in counts):
        mine, other = getattr(left, part), getattr(right, part)
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine), part


@pytest.mark.parametrize("part", ["default", "old", "ema", "exp_avg_sq"])
def test_a_state_that_is_not_finite_is_not_saved_and_the_one_before_stays(part: str, tmp_path: Path) -> None:
    before, after = a_state(3), a_state(4)
    before.save(tmp_path / "iteration-000003")
    getattr(after, part)["block.lora_B"][2, 1] = torch.nan
    with pytest.raises(
        RunError, match=rf"{part}/block\.lora_B has NaN or Inf after update 4: .* the previous one is kept"
    ):
        after.save(tmp_path / "iteration-000004")
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-000003"]
    assert_equal(LearnerState.load(tmp_path / "iteration-000003"), before)


def test_a_saved_state_comes_back_bit_for_bit_in_files_of_equal_bytes(tmp_path: Path) -> None:
    a_state().save(tmp_path / "here")
    a_state(2).save(tmp_path / "there")  # is replaced
    LearnerState.load(tmp_path / "here").save(tmp_path / "there")
    assert_equal(LearnerState.load(tmp_path / "there"), a_state())
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == ["optimizer.safetensors", "policy.safetensors", "state.json"]
    for name in names:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()


def test_what_a_killed_save_left_behind_is_no_state_and_no_obstacle(tmp_path: Path) -> None:
    left = tmp_path / ".state.partial"
    left.mkdir()
    (left / "policy.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match="no complete learner state"):
        LearnerState.load(tmp_path / "state")
    a_state().save(tmp_path / "state")
    assert_equal(LearnerState.load(tmp_path / "state"), a_state())


@pytest.mark.parametrize("name", ["policy.safetensors", "optimizer.safetensors"])
def test_a_changed_cut_off_or_missing_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    a_state().save(tmp_path / "state")
    file = tmp_path / "state" / name
    data = file.read_bytes()
    for other in (data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], data[:-4]):
        file.write_bytes(other)
        with pytest.raises(UserError, match=f"{name} is damaged"):
            LearnerState.load(tmp_path / "state")
    file.unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        LearnerState.load(tmp_path / "state")


@pytest.mark.parametrize("name", ["policy.safetensors", "optimizer.safetensors", "state.json"])
def test_a_file_that_the_disk_does_not_give_is_refused_by_name(tmp_path: Path, name: str) -> None:
    a_state().save(tmp_path / "state")
    make_unreadable(tmp_path / "state" / name)
    with pytest.raises(UserError, match=f"{name} cannot be read: Input/output error"):
        LearnerState.load(tmp_path / "state")


def test_a_manifest_of_another_format_or_half_written_is_refused(tmp_path: Path) -> None:
    a_state().save(tmp_path / "state")
    path = tmp_path / "state" / "state.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"format": "solrl-learner-state/99"}))
    with pytest.raises(UserError, match="solrl-learner-state/99"):
        LearnerState.load(tmp_path / "state")
    path.write_text(json.dumps(manifest | {"updates": 4}))
    with pytest.raises(UserError, match="checksum"):
        LearnerState.load(tmp_path / "state")
    path.write_text(json.dumps(manifest)[:40])
    with pytest.raises(UserError, match="damaged"):
        LearnerState.load(tmp_path / "state")


@pytest.mark.parametrize(
    "change",
    [
        {"updates": "two"},
        {"steps": None},
        {"files": {"policy.safetensors": 3, "optimizer.safetensors": 3}},
        {"tensors": {"elsewhere/x": torch.zeros(1)}},
        {"tensors": {"default/x": torch.zeros(1, dtype=torch.int32)}},
        {"tensors": {"default/x": torch.zeros(1, dtype=torch.complex64)}},
        {"content": b"no safetensors"},
    ],
)
def test_a_state_that_somebody_else_wrote_is_one_sentence(change: dict[str, Any], tmp_path: Path) -> None:
    """Its checksums are right."""
    folder = tmp_path / "state"
    a_state().save(folder)
    manifest = json.loads((folder / "state.json").read_text())
    del manifest["sha256"]
    if {"tensors", "content"} & change.keys():
        content = change.get("content") or safetensors.torch.save(change["tensors"])
        (folder / "policy.safetensors").write_bytes(content)
        stated = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        change = {"files": manifest["files"] | {"policy.safetensors": stated}}
    manifest |= change
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "state.json").write_text(json.dumps(manifest | {"sha256": digest}))
    with pytest.raises(UserError, match=rf"^{folder} is not a learner state: "):
        LearnerState.load(folder)


def test_a_state_of_another_model_is_refused_by_factor_name() -> None:
    shapes = {"block.lora_A": torch.Size([2, 5]), "block.lora_B": torch.Size([3, 2])}
    a_state().check_fits(shapes)
    with pytest.raises(UserError, match=r"block.lora_A is \(2, 5\), the model has \(4, 5\)"):
        a_state().check_fits(shapes | {"block.lora_A": torch.Size([4, 5])})
    with pytest.raises(UserError, match=r"other\.lora_A is missing"):
        a_state().check_fits(shapes | {"other.lora_A": torch.Size([4, 5])})
    with pytest.raises(UserError, match=r"exp_avg of block\.lora_B is missing"):
        replace(a_state(), exp_avg={"block.lora_A": torch.zeros(2, 5)}).check_fits(shapes)
