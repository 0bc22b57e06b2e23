"""Two cards: who is where in each part, which process is killed, and what the figures of a loss are."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import many_gpus
import pytest
import two_cards

from solrl_ray.config.checks import check
from solrl_ray.config.loading import load
from solrl_ray.config.pools import on_cards
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.plan.gpu_memory import gpus
from solrl_ray.report.trace import Span

GIVEN = argparse.Namespace(model="flux", gpus=2, work=Path("work"), set=[], layers=None)


@pytest.mark.parametrize(
    ("part", "cards", "explorers", "of_cards", "ranks"),
    [
        ("alone", 1, 1, 1, 1),
        ("beside", 2, 2, 1, 1),
        ("split_packed", 2, 1, 0, 1),
        ("split_lora", 2, 1, 0, 1),
        ("lost_0", 2, 2, 2, 2),
        ("lost_1", 2, 2, 2, 2),
    ],
)
def test_each_part_has_its_processes_on_its_cards(
    part: str, cards: int, explorers: int, of_cards: int, ranks: int
) -> None:
    given = two_cards.run(GIVEN, part)
    config = load(many_gpus.files(given), many_gpus.settings(given))
    check(config)
    assert gpus(config) == cards
    assert (config.fleet.explorers.count, on_cards(config, "explorers")) == (explorers, of_cards)
    assert config.learner.world_size == ranks
    assert config.publish.mode == ("lora" if part == "split_lora" else "packed")
    assert (pool_sampling(config).pool, config.rollout.keep, config.rollout.prompts) == (48, 8, 2)


# The loss of a card


@pytest.fixture
def gpu_memories(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that look like two cards in an update; they are children of a child of this process."""
    running = []
    for number in (0, 1):
        with (tmp_path / f"card-{number}.out").open("w") as out:
            out.write(f":job_id:01000000\n:actor_name:Gpu\n:actor_name:card-{number}\n")
            out.flush()
            command = "(exec -a ray::learner.update sleep 600) & echo $! >&2; wait"
            running.append(subprocess.Popen(["bash", "-c", command], stdout=out, stderr=subprocess.PIPE))
    yield running
    for process in running:
        for pid in two_cards.descendants(process.pid):
            subprocess.run(["kill", "-9", str(pid)], check=False, stderr=subprocess.DEVNULL)
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_the_process_of_the_named_card_is_killed_in_the_second_update_and_the_other_one_lives(
    cards: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    of_cards = []
    for process in cards:
        assert process.stderr is not None
        of_cards.append(int(process.stderr.readline()))
    killer = two_cards.CardKiller(tmp_path, 1)
    killer.start()
    time.sleep(0.5)
    assert [two_cards.alive(pid) for pid in of_cards] == [True, True]  # the first update is not over
    record = {"event": "iteration", "iteration": 0, "busy_seconds": {"learn": 2.0}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    written = time.time()
    assert cards[1].wait(timeout=60) == 0
    assert not two_cards.alive(of_cards[1])
    assert two_cards.alive(of_cards[0])
    killer.stop()
    assert killer.at > written + 0.6 - 0.05  # 0.3 of the 2 s
    assert killer.ended == {"card-0": float("inf")}


def span(kind: str, name: str, stage: str, started: float, seconds: float, worker: str = "") -> Span:
    return Span(kind=kind, name=name, stage=stage, iteration=1, started=started, seconds=seconds, worker=worker)  # type: ignore[arg-type]


SPANS = [
    span("stage", "publishing revision 1", "publish", 100.0, 1.0),
    span("unit", "1-0", "explore", 100.5, 4.0, "explorer-0"),
    span("unit", "1-1", "explore", 103.25, 4.0, "explorer-1"),
    span("unit", "1-2", "explore", 104.5, 4.0, "explorer-0"),
    span("stage", "learning", "learn", 110.0, 50.0),
    span("work", "loading transformer", "start", 115.5, 20.0, "explorer-1.1"),
    span("work", "moving transformer", "start", 135.5, 0.1, "explorer-1.1"),
]


def test_a_loss_is_counted_from_the_kill_to_the_end_of_the_update_that_it_was_in() -> None:
    killer = two_cards.CardKiller(Path("folder"), 1)
    killer.at, killer.ended = 112.0, {"card-0": 142.0, "card-2": 170.0}
    found = two_cards.loss(SPANS, killer, "[0:01] learning\n[0:02] card-1 was lost (…)\n")
    assert found["to_next_update"] == 48.0
    assert found["into_update"] == 2.0
    assert found["lived"] == ["card-2"]
    assert found["said"] == ["[0:02] card-1 was lost (…)"]
    assert found["work"] == [("explorer-1.1", "loading transformer", 3.5, 20.0)]


def test_a_kill_outside_of_the_update_gives_no_figures() -> None:
    killer = two_cards.CardKiller(Path("folder"), 1)
    with pytest.raises(SystemExit, match="card-1 was not killed in the update of iteration 1"):
        two_cards.loss(SPANS, killer, "")


def test_an_explorer_waits_from_the_end_of_the_update_to_its_first_preview() -> None:
    assert two_cards.waits(SPANS, 1) == {"explorer-0": 0.5, "explorer-1": 3.25}
