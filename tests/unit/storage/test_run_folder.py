import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
import torch

from solrl_ray.common.files import claim
from solrl_ray.config import compiled_learner
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Checkpoints, Config
from solrl_ray.errors import UserError
from solrl_ray.records import SampleGroup, SampleShape, Trajectory
from solrl_ray.report.data import read_run
from solrl_ray.scheduling.iteration_state import group_digest
from solrl_ray.storage import continuation
from solrl_ray.storage.journal import Journal
from solrl_ray.storage.run_folder import RunFolder, Unreadable
from tests.support import made_runs

DEMO = Path(__file__).parents[3] / "configs" / "demo.yaml"
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


def test_a_journal_that_was_set_aside_begins_anew(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    journal.append({"n": 0})
    assert journal.set_aside() == tmp_path / "j.jsonl.stale"
    assert journal.entries() == []
    journal.append({"n": 1})
    assert [e["n"] for e in journal.entries()] == [1]
    assert [e["n"] for e in Journal(tmp_path / "j.jsonl.stale").entries()] == [0]


def test_a_group_comes_back_with_its_trajectory_which_its_digest_covers(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    states = torch.randn(len(GROUP.indices), 3, *GROUP.latents.shape[1:], generator=torch.Generator().manual_seed(3))
    own = ((0.25, 1.0), (0.5, 2.0), (0.75, 3.0), (1.0, 4.0))
    group = replace(GROUP, trajectory=Trajectory(states=states, first_step=4), components=own)
    folder.save_group(group)
    back = folder.load_group(group.iteration, group.prompt_id)
    assert torch.equal(back.latents, GROUP.latents)
    assert replace(back, latents=GROUP.latents, trajectory=None) == replace(GROUP, components=own)
    assert back.trajectory.first_step == 4
    assert torch.equal(back.trajectory.states, states)
    shaped = replace(GROUP, shape=SampleShape(24, 40))
    folder.save_group(shaped)
    assert folder.load_group(2, "beef").shape == shaped.shape
    shapes = (shaped.shape, SampleShape(24, 24), SampleShape(40, 40), None)
    assert len({group_digest(replace(GROUP, shape=shape)) for shape in shapes}) == 4
    others = (GROUP, replace(group, trajectory=Trajectory(states=states, first_step=5)))
    others += (replace(group, trajectory=Trajectory(states=-states, first_step=4)),)
    assert len({group_digest(each) for each in (group, *others)}) == 4


def test_groups_of_an_iteration_may_be_stored_at_the_same_time(tmp_path: Path) -> None:
    """The first ones make the iteration's folder together."""
    together = Barrier(8)

    def store(number: int) -> None:
        group = replace(GROUP, iteration=number // 8, prompt_id=str(number))
        together.wait(5)
        folder.save_group(group)

    folder = RunFolder(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(store, range(8 * 8)))
    assert len(list((tmp_path / "samples").glob("*/*.safetensors"))) == 8 * 8


def test_a_stored_group_that_is_cut_anywhere_or_gone_is_unreadable(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save_group(GROUP)
    path = next(tmp_path.rglob("beef.safetensors"))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(Unreadable, match=r"beef\.safetensors cannot be read: "):
            folder.load_group(2, "beef")
    path.unlink()
    with pytest.raises(Unreadable):
        folder.load_group(2, "beef")


def test_a_stored_group_with_any_byte_altered_is_unreadable_or_another_group(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save_group(GROUP)
    path = next(tmp_path.rglob("beef.safetensors"))
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x04]) + whole[position + 1 :])
        try:
            back = folder.load_group(2, "beef")
        except Unreadable:
            continue
        seen = {(g.indices, g.revision, g.seconds, g.worker, group_digest(g)) for g in (GROUP, back)}
        assert len(seen) == 2, f"byte {position} was altered and nobody saw it"


def test_a_folder_in_use_is_refused_and_is_free_after_a_kill(tmp_path: Path) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from solrl_ray.storage.run_folder import RunFolder\n"
        "lock = RunFolder(Path(sys.argv[1])).lock; lock.acquire(seconds=0); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"in use by process {holder.pid} on {os.uname().nodename}"):
        RunFolder(tmp_path).lock.acquire(seconds=0)
    holder.kill()
    holder.wait()
    RunFolder(tmp_path).lock.acquire(seconds=5)


def test_whether_a_folder_is_in_use_may_be_asked_by_several_at_a_time_and_keeps_nobody_out(tmp_path: Path) -> None:
    """Asking shares the lock: another one who asks, or `solrl status`, is no process that works there."""
    lock, other = RunFolder(tmp_path).lock, RunFolder(tmp_path).lock
    assert not lock.held  # nobody has ever worked there
    lock.acquire(seconds=0)
    assert other.held
    lock.release()
    with (tmp_path / "lock").open("rb") as asking:
        claim(tmp_path, asking, alone=False)
        assert not other.held
        with pytest.raises(UserError, match="in use by process"):
            other.acquire(seconds=0)
    assert not other.held
    other.acquire(seconds=0)
    assert lock.held
    owner = f"process {os.getpid()} on {os.uname().nodename}"
    with pytest.raises(UserError, match=rf" is in use by {owner}; wait for its end, or stop it$"):
        lock.acquire(seconds=0)  # the one that works there now, and nobody from before
    other.release()
    assert not lock.held


def small(root: Path, *overrides: str) -> Config:
    return load([DEMO], [f"run.root='{root}'", "run.name=small", *overrides])


def begun(root: Path, what: str) -> Path:
    """A run folder that was created and then came as far as `what`."""
    config = small(root)
    folder = RunFolder.of(config)
    folder.create(config, resume=False)
    if what == "a journal":
        folder.journal(0).append({"kind": "open"})
    elif what == "a checkpoint":
        folder.checkpoint(3).mkdir(parents=True)
    folder.lock.release()
    return folder.path


@pytest.mark.parametrize("what", ["a journal", "a checkpoint"])
def test_a_second_run_into_a_folder_where_work_was_done_is_refused(tmp_path: Path, what: str) -> None:
    path = begun(tmp_path, what)
    before = (path / "config.yaml").read_bytes()
    with pytest.raises(UserError, match=r"run\.name is 'small'.* --resume"):
        RunFolder(path).create(small(tmp_path, "run.seed=5"), resume=False)
    assert (path / "config.yaml").read_bytes() == before
    RunFolder(path).lock.acquire(seconds=0)  # the refused one holds no lock


def test_what_an_attempt_left_that_trained_nothing_is_cleared_away(tmp_path: Path) -> None:
    path = begun(tmp_path, "nothing")
    (path / "metrics.jsonl").write_text('{"event": "evaluation", "iteration": 0}\n')
    (path / "embeddings").mkdir()
    (path / "embeddings" / ".x.safetensors.7.partial").write_text("cut")
    (path / "trackers.json").write_text('{"id": "0123abcd"}')
    (path / "wandb" / "offline-run").mkdir(parents=True)
    (path / "mine.txt").write_text("kept")
    corrected = small(tmp_path, "run.seed=5")
    RunFolder(path).create(corrected, resume=False)
    assert load([path / "config.yaml"]) == corrected
    assert sorted(p.name for p in path.rglob("*")) == ["config.yaml", "embeddings", "format", "lock", "mine.txt"]


def test_a_folder_that_is_not_a_runs_is_written_into_but_nothing_is_removed(tmp_path: Path) -> None:
    (tmp_path / "small" / "samples").mkdir(parents=True)
    RunFolder(tmp_path / "small").create(small(tmp_path), resume=False)
    assert (tmp_path / "small" / "samples").is_dir()


def test_there_is_nothing_to_resume_where_no_run_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path / "small")):
        RunFolder(tmp_path / "small").create(small(tmp_path), resume=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("content", "found"), [(None, "1"), ("4\n", "4"), ("8\n", "8")])
def test_a_folder_of_another_format_is_refused_by_whoever_reads_it(
    tmp_path: Path, content: str | None, found: str
) -> None:
    path = begun(tmp_path, "a checkpoint")
    assert (path / "format").read_text() == f"{continuation.FORMAT}\n"
    (path / "metrics.jsonl").touch()
    (path / "format").unlink()
    if content is not None:
        (path / "format").write_text(content)
    before = sorted(path.rglob("*"))
    said = (
        rf"small is a run folder of format {found}, but this version reads format 7\. Use the version that wrote it\.$"
    )
    for read in (
        lambda: RunFolder(path).create(small(tmp_path), resume=True),
        lambda: continuation.stored(path),
        lambda: read_run(path),
    ):
        with pytest.raises(UserError, match=said):
            read()
    assert sorted(path.rglob("*")) == before


def test_a_resumed_run_cannot_be_shorter_than_what_was_trained(tmp_path: Path) -> None:
    path = begun(tmp_path, "a checkpoint")
    with pytest.raises(UserError, match=r"run\.iterations is 2, but .*small .* 3 updates"):
        RunFolder(path).create(small(tmp_path, "run.iterations=2"), resume=True)
    assert load([path / "config.yaml"]) == small(tmp_path)


def test_too_little_free_space_is_refused_before_the_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoints\.min_free_gb .* 1e\+09 GB"):
        RunFolder(tmp_path / "small").create(small(tmp_path, "checkpoints.min_free_gb=1e9"), resume=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/small cannot be written: it is a file \(.*/file\)"):
        RunFolder(tmp_path / "file" / "small").create(small(tmp_path / "file"), resume=False)
    lock = tmp_path / "small" / "lock"
    lock.mkdir(parents=True)
    with pytest.raises(UserError, match=r"small cannot be written: Is a directory"):
        RunFolder(tmp_path / "small").create(small(tmp_path), resume=False)
    lock.rmdir()
    lock.symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"small cannot be written: "):
        RunFolder(tmp_path / "small").create(small(tmp_path), resume=False)


def test_metrics_rewind_to_what_the_checkpoint_contains(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    iterations = [made_runs.iteration(number) for number in range(3)]
    base, after_two, after_three = (made_runs.evaluation(n, "ema", made_runs.FINAL) for n in (0, 2, 3))
    for record in (base, *iterations[:2], after_two, iterations[2], after_three):
        folder.append_metrics(record)
    with folder.metrics.open("a") as file:
        file.write('{"event": "iter')
    folder.rewind_metrics(2)
    assert folder.read_metrics() == [base, *iterations[:2], after_two]


def test_pruning_keeps_the_samples_after_the_newest_checkpoints_not_of_those_kept_for_good(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for updates in range(1, 5):
        folder.checkpoint(updates).mkdir(parents=True)
        (tmp_path / "samples" / f"iteration-{updates - 1:06d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "iteration-000009.damaged").mkdir()
    (tmp_path / "checkpoints" / "iteration-new").mkdir()
    (tmp_path / "checkpoints" / "iteration-000008").write_text("a file")
    folder.prune(Checkpoints(keep=2, every=2))
    assert [updates for updates, _ in folder.checkpoints()] == [2, 3, 4]
    assert [p.name for p in sorted((tmp_path / "samples").iterdir())] == ["iteration-000003"]


def test_pruning_bounds_the_journals(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "journal").mkdir()
    for updates in range(1, 41):
        folder.checkpoint(updates).mkdir(parents=True)
        folder.journal(updates - 1).path.touch()
        folder.journal(updates - 1).path.with_suffix(".jsonl.stale").touch()
        folder.prune(Checkpoints(keep=2))
    (tmp_path / "journal" / "mine.txt").touch()
    folder.prune(Checkpoints(keep=2))
    # A run may go back to the checkpoint after 39 updates and then needs journal 39; 16 before that stay.
    kept = [f"iteration-{number:06d}.jsonl{end}" for number in range(39 - 16, 40) for end in ("", ".stale")]
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == [*kept, "mine.txt"]


def test_what_the_cards_decide_is_written_and_kept_by_a_resumed_run(tmp_path: Path) -> None:
    open_to_cards = ["learner.activation_memory=null", "compile.learner=true", "fleet.learners.num_gpus=1"]
    given = load([DEMO], [f"run={{root: '{tmp_path}', name: small}}", *open_to_cards])
    folder = RunFolder.of(given)
    folder.create(given, resume=False)
    assert continuation.stored(folder.path) == given  # nothing is decided: it may die before
    decided = compiled_learner.keeping(given, 0.5, given.learner.micro_batch // 2)
    fleet = given.fleet.model_copy(update={"offload": True})
    folder.settle(decided.model_copy(update={"fleet": fleet}))
    assert continuation.stored(folder.path) == decided  # offloading changes no bytes and may be decided again
    assert continuation.inherit_from(given, continuation.stored(folder.path)) == decided
    folder.lock.release()


def test_a_full_disk_is_named_by_the_file_that_found_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "iteration-000000.jsonl")
    journal._file = open("/dev/full", "ab")  # noqa: SIM115 (whose reader would never end)
    with pytest.raises(OSError, match="No space left on device") as caught:
        journal.append({"kind": "explore"})
    assert caught.value.filename == str(journal.path)
