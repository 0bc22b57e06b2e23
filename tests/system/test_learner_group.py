"""The learner as a group of real processes: ranks agree, states survive and move between world sizes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from solrl_ray import models
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.learning.engine import free_port, leave_process_group, process_group
from solrl_ray.learning.learner import Learner
from solrl_ray.learning.state import LearnerState
from solrl_ray.policy.digest import lora_digest
from solrl_ray.policy.saving import FILE as LORA_FILE
from solrl_ray.storage.run_folder import RunFolder
from tests.support.learning import config, embeddings, groups
from tests.support.patience import wait_until
from tests.support.small import digests, folder, small_config, summary
from tests.system.ranks import run_ranks

STATE_FILES = ("policy.safetensors", "optimizer.safetensors", "state.json")
POLICIES: tuple[Literal["default", "old", "ema"], ...] = ("default", "old", "ema")


def build(pipeline: Path, rank: int, world_size: int, **sections: Any) -> Learner:
    settings = config(pipeline, learner={"world_size": world_size}, **sections)
    model = models.load(settings.model, torch.device("cpu"), components={"transformer"})
    return Learner(settings, model, rank, world_size)


def run(learner: Learner, first: int, updates: int) -> None:
    for iteration in range(first, first + updates):
        learner.update(iteration, groups(iteration), embeddings())


def save(learner: Learner, rank: int, folder: Path) -> None:
    state = learner.state()
    if rank == 0:
        state.save(folder)


def train_straight_and_half(rank: int, world_size: int, pipeline: Path, folder: Path) -> None:
    straight = build(pipeline, rank, world_size)
    run(straight, 0, 4)
    save(straight, rank, folder / "straight")
    digests = {policy: lora_digest(straight.factors(policy)) for policy in POLICIES}
    (folder / f"digests-{rank}.json").write_text(json.dumps(digests))
    half = build(pipeline, rank, world_size)
    run(half, 0, 2)
    save(half, rank, folder / "half")


def resume(rank: int, world_size: int, pipeline: Path, folder: Path, *moves: tuple[str, str]) -> None:
    """For each (origin, name): go on from the states called `origin` to four updates, and leave all on the way."""
    for origin, name in moves:
        learner = build(pipeline, rank, world_size)
        learner.load(state := LearnerState.load(folder / origin))
        for iteration in range(state.updates, 4):
            run(learner, iteration, 1)
            save(learner, rank, folder / f"{name}-{iteration + 1}")


def rejoin(rank: int, world_size: int, pipeline: Path, folder: Path) -> None:
    """Go on in another group, after the first was aborted."""
    first = build(pipeline, rank, world_size)
    run(first, 0, 2)
    save(first, rank, folder / "half")
    run(first, 2, 2)
    digests = [lora_digest(first.factors("default"))]
    torch.distributed.destroy_process_group()  # leaves what `abort_process_group` leaves of NCCL's groups
    first.close()
    leave_process_group()
    process_group(0, 1, "127.0.0.1", free_port(), device=torch.device("cpu"), timeout=60, one_host=True)
    second = build(pipeline, rank, world_size)
    second.load(LearnerState.load(folder / "half"))
    run(second, 2, 2)
    digests.append(lora_digest(second.factors("default")))
    (folder / "digests.json").write_text(json.dumps(digests))


def count_reductions(rank: int, world_size: int, pipeline: Path, folder: Path) -> None:
    reduce, sizes = torch.distributed.all_reduce, list[int]()
    learner = build(pipeline, rank, world_size)

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    torch.distributed.all_reduce = counted
    metrics = learner.update(0, groups(0), embeddings())
    torch.distributed.all_reduce = reduce
    trained = sum(value.numel() for value in learner.factors("default").values())
    found: dict[str, Any] = {"passes": metrics.passes, "sizes": sizes, "trained": trained}
    (folder / f"reductions-{rank}.json").write_text(json.dumps(found))


def refuse(rank: int, world_size: int, pipeline: Path, folder: Path) -> None:
    """Give rank 1 other rewards than rank 0, then both samples whose loss overflows."""
    learner = build(pipeline, rank, world_size)
    found = {"before": lora_digest(learner.factors("default"))}
    made, spoiled = groups(0), groups(0)
    if rank == 1:
        made[0] = replace(made[0], rewards=made[0].rewards[::-1])
    spoiled[0] = replace(spoiled[0], latents=spoiled[0].latents * 1e30)
    for name, given in (("different", made), ("spoiled", spoiled)):
        with pytest.raises(RunError) as raised:
            learner.update(0, given, embeddings())
        found[name] = str(raised.value)
    found["after"] = lora_digest(learner.factors("default"))
    (folder / f"refusals-{rank}.json").write_text(json.dumps(found))


def take_offers(rank: int, world_size: int, pipeline: Path, folder: Path) -> None:
    """Two updates at once, and two whose samples rank 0 takes prompt by prompt and rank 1 all together."""
    by_group = {"advantage": {"std": "group"}}
    at_once = build(pipeline, rank, world_size, objective=by_group)
    run(at_once, 0, 2)
    save(at_once, rank, folder / "at-once")
    unequal, passes = build(pipeline, rank, world_size, objective=by_group), []
    for iteration in (0, 1):
        made = groups(iteration)
        unequal.begin(iteration, [len(group.indices) for group in made])
        for taken in [made] if rank else [[group] for group in made]:
            passes.append(unequal._opened().parts[0].sums.passes)
            unequal.add_groups(taken, embeddings())
        unequal.finish(iteration)
    save(unequal, rank, folder / "unequal")
    (folder / f"passes-{rank}.json").write_text(json.dumps(passes))


def wait_in_vain(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Rank 0 of another group has a collective to which rank 1 does not come."""
    leave_process_group()
    device = torch.device("cpu")
    process_group(rank, world_size, "127.0.0.1", port, device=device, timeout=3.0, one_host=True)
    said = folder / "said"
    if rank == 0:
        with pytest.raises(RuntimeError) as raised:
            torch.distributed.all_reduce(torch.ones(1))
        said.write_text(str(raised.value))
    wait_until("what rank 0 said", said.exists)


def first_group(rank: int, world_size: int, pipeline: Path, folder: Path, port: int) -> None:
    train_straight_and_half(rank, world_size, pipeline, folder)
    count_reductions(rank, world_size, pipeline, folder)
    refuse(rank, world_size, pipeline, folder)
    take_offers(rank, world_size, pipeline, folder)
    wait_in_vain(rank, world_size, port, folder)


@pytest.fixture(scope="module")
def two_ranks(forks: str, tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left behind: states after 4 updates and after 2, counts, refusals."""
    folder = tmp_path_factory.mktemp("two-ranks")
    run_ranks(forks, 2, first_group, tiny_pipeline, folder, free_port())
    return folder


def files(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in STATE_FILES]


def test_both_ranks_hold_the_same_policies(two_ranks: Path) -> None:
    first, second = (json.loads((two_ranks / f"digests-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert len(set(first.values())) == len(POLICIES)


def test_gradients_are_reduced_once_an_update(two_ranks: Path) -> None:
    for rank in (0, 1):
        found = json.loads((two_ranks / f"reductions-{rank}.json").read_text())
        assert found["passes"] == 6
        assert [size for size in found["sizes"] if size > 5] == [found["trained"]]


def test_ranks_given_different_or_spoiled_samples_all_refuse(two_ranks: Path) -> None:
    for rank in (0, 1):
        found = json.loads((two_ranks / f"refusals-{rank}.json").read_text())
        assert "different samples" in found["different"]
        assert "the loss of iteration 0 is" in found["spoiled"]
        assert found["before"] == found["after"]


def test_ranks_of_unequal_progress_end_with_the_bytes_of_an_update_at_once(two_ranks: Path) -> None:
    before_each_take = [json.loads((two_ranks / f"passes-{rank}.json").read_text()) for rank in (0, 1)]
    assert before_each_take == [[0, 3, 3] * 2, [0] * 2]  # rank 0 has learned from the first prompt alone
    assert files(two_ranks / "unequal") == files(two_ranks / "at-once")


def test_a_rank_does_not_wait_longer_for_the_others_than_it_was_told(two_ranks: Path) -> None:
    assert "Timed out waiting 3000ms" in (two_ranks / "said").read_text()


def test_a_rank_whose_group_was_aborted_goes_on_in_another_one(forks: str, tiny_pipeline: Path, tmp_path: Path) -> None:
    run_ranks(forks, 1, rejoin, tiny_pipeline, tmp_path)
    undisturbed, rejoined = json.loads((tmp_path / "digests.json").read_text())
    assert rejoined == undisturbed


@pytest.fixture(scope="module")
def moved(forks: str, two_ranks: Path, tiny_pipeline: Path) -> Path:
    """States of those who went on: two ranks, one rank, and two ranks where that one had made one update."""
    run_ranks(forks, 1, resume, tiny_pipeline, two_ranks, ("half", "one"))
    run_ranks(forks, 2, resume, tiny_pipeline, two_ranks, ("half", "resumed"), ("one-3", "two"))
    return two_ranks


def test_new_processes_resume_to_the_bytes_of_an_undisturbed_group(moved: Path) -> None:
    assert files(moved / "resumed-4") == files(moved / "straight")


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_state_of_two_ranks_continues_on_one_and_one_of_one_rank_on_two(moved: Path, name: str) -> None:
    found = LearnerState.load(moved / f"{name}-4")
    assert found.updates == 4
    straight, half = (LearnerState.load(moved / origin) for origin in ("straight", "half"))
    assert_close(found, straight, before=half)


def assert_close(found: LearnerState, expected: LearnerState, *, before: LearnerState) -> None:
    """Sums over other numbers of ranks are taken in another order: equal but for rounding."""
    moved = max((expected.default[n] - before.default[n]).abs().max().item() for n in before.default)
    for part in (*POLICIES, "exp_avg", "exp_avg_sq"):
        for name, tensor in getattr(expected, part).items():
            torch.testing.assert_close(getattr(found, part)[name], tensor, rtol=1e-3, atol=1e-3 * moved)


def test_a_run_goes_on_with_more_learner_ranks_and_with_fewer(calm: Config, tmp_path: Path) -> None:
    from actors.client import launch  # here: the ranks of the other tests import this file, and need no Ray

    more = small_config(tmp_path, "resumed", "learner.world_size=2")
    shutil.copytree(folder(calm), folder(more))
    shutil.rmtree(RunFolder.of(more).checkpoint(3))
    (folder(more) / "lora" / LORA_FILE).unlink()
    launch.train(more, live=False, resume=True)
    assert_close(checkpoint(more, 3), checkpoint(calm, 3), before=checkpoint(calm, 2))
    assert digests(more)[0] == digests(calm)[0]
    launch.train(small_config(tmp_path, "resumed", "run.iterations=4"), live=False, resume=True)
    assert checkpoint(more, 4).updates == summary(more)["iterations"] == 4


def checkpoint(config: Config, updates: int) -> LearnerState:
    return LearnerState.load(RunFolder.of(config).checkpoint(updates))
