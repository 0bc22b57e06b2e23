import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from solrl_ray.errors import UserError
from solrl_ray.journal import Journal
from solrl_ray.records import SampleGroup
from solrl_ray.run_folder import RunFolder

GROUP = SampleGroup(
    iteration=2,
    revision=2,
    prompt_id="beef",
    indices=(5, 1, 0, 3),
    rewards=(0.9, 0.8, 0.1, 0.2),
    latents=torch.arange(8, dtype=torch.float32).reshape(4, 2),
    seconds=1.5,
    worker="regenerator-0",
)


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_journal_cut_anywhere_keeps_all_whole_lines_and_goes_on(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "j.jsonl"
    journal = Journal(path)
    journal.append({"n": 0, "text": "åé"}, {"n": 1})
    journal.append({"n": 2, "pad": "x" * 20})
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [e["n"] for e in Journal(path).entries()] == [0, 1]
    again = Journal(path)
    again.append({"n": 3})
    again.close()
    assert [e["n"] for e in Journal(path).entries()] == [0, 1, 3]


def test_a_journal_stops_at_a_line_whose_checksum_does_not_hold(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    Journal(path).append({"n": 0}, {"n": 1}, {"n": 2})
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines[1].endswith(b'{"n":1}\n')
    path.write_bytes(lines[0] + lines[1].replace(b'{"n":1}', b'{"n":7}') + lines[2])
    assert [e["n"] for e in Journal(path).entries()] == [0]


def test_a_journal_that_was_set_aside_begins_anew(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    journal.append({"n": 0})
    assert journal.set_aside() == tmp_path / "j.jsonl.stale"
    assert journal.entries() == []
    journal.append({"n": 1})
    assert [e["n"] for e in journal.entries()] == [1]
    assert [e["n"] for e in Journal(tmp_path / "j.jsonl.stale").entries()] == [0]


def test_a_stored_group_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save_group(GROUP)
    back = folder.load_group(2, "beef")
    assert torch.equal(back.latents, GROUP.latents)
    assert (back.indices, back.rewards, back.revision, back.worker) == (
        GROUP.indices,
        GROUP.rewards,
        2,
        "regenerator-0",
    )


def test_a_folder_in_use_is_refused_and_is_free_after_a_kill(tmp_path: Path) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from solrl_ray.run_folder import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1])); folder.lock(seconds=0); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"in use by process {holder.pid} on {os.uname().nodename}"):
        RunFolder(tmp_path).lock(seconds=0)
    holder.kill()
    holder.wait()
    RunFolder(tmp_path).lock(seconds=5)


def test_metrics_rewind_to_what_the_checkpoint_contains(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for record in (
        {"event": "evaluation", "iteration": 0},
        {"event": "iteration", "iteration": 0},
        {"event": "iteration", "iteration": 1},
        {"event": "evaluation", "iteration": 2},
        {"event": "iteration", "iteration": 2},
        {"event": "evaluation", "iteration": 3},
    ):
        folder.append_metrics(record)
    with folder.metrics.open("a") as file:
        file.write('{"event": "iter')
    folder.rewind_metrics(2)
    kept = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [(r["event"][0], r["iteration"]) for r in kept] == [("e", 0), ("i", 0), ("i", 1), ("e", 2)]


def test_pruning_keeps_the_newest_checkpoints_and_the_samples_after_them(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for updates in range(1, 5):
        folder.checkpoint(updates).mkdir(parents=True)
        (tmp_path / "samples" / f"iteration-{updates - 1:06d}").mkdir(parents=True)
    folder.prune(keep=2)
    assert [updates for updates, _ in folder.checkpoints()] == [3, 4]
    assert [p.name for p in sorted((tmp_path / "samples").iterdir())] == ["iteration-000003"]
