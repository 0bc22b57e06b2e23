"""What a controller finds in its run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.run_parts import RunParts
from solrl_ray.config.loading import load
from solrl_ray.errors import UserError
from solrl_ray.simulator import virtual_clock
from solrl_ray.simulator.memory_disk import MemoryDisk
from solrl_ray.simulator.world import SimulatedWorld
from solrl_ray.storage.resume import check_prompts
from tests.support.documents import ROOT


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_prompts_that_changed_after_the_command_has_read_them_are_refused(tmp_path: Path, part: str) -> None:
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.txt").write_text(f"a {name} cat\na {name} dog\n")
    config = load(
        [ROOT / "configs" / "demo.yaml"],
        [f"prompts={{train: {tmp_path}/train.txt, heldout: {tmp_path}/heldout.txt}}", "rollout.prompts=1"],
    )
    nobody: Any = None

    async def made() -> RunParts:
        return RunParts(config, tmp_path / "run", SimulatedWorld(nobody, MemoryDisk()))

    first = virtual_clock.run(made())
    check_prompts(first.folder, config)
    first._find()
    assert [prompt.text for prompt in first.heldout] == ["a heldout cat", "a heldout dog"]
    first.folder.lock.release()
    (tmp_path / f"{part}.txt").write_text("a bird\nanother bird\n")
    with pytest.raises(UserError, match=rf"^prompts\.{part} is .*{part}\.txt', whose prompts are not those that the run in "):
        virtual_clock.run(made())._find()
