"""Thousands of runs of the real controller, each with other sizes and other faults, end with the same digests.

``make simulate SEEDS=a..b`` runs a range of seeds; a failing seed is run again with ``--trace``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.simulated.faults import Fault
from tests.simulated.plans import ENDS, KINDS, SHAPES, Plan, Shape
from tests.simulated.runs import judge, run, undisturbed, violation
from tests.simulated.world import SimulatedWorld

SEEDS = 2000
SMALL = Shape(
    iterations=2,
    prompts=2,
    units=2,
    staleness=0,
    every=0,
    strategy="two_stage",
    unit=8,
    prune="{after: 1, keep: 6}",
)
"""A pool is one unit that is pruned."""
ONCE = Shape(
    iterations=4, prompts=3, units=2, staleness=0, every=1, strategy="two_stage", unit=4, on_collapse="rollback"
)
"""Goes back once."""
TWICE = replace(ONCE, iterations=5, unit=8)
"""Goes back twice."""
RARELY = replace(ONCE, iterations=6, every=2)
"""Goes back twice to the base. Each time an iteration follows before the next evaluation."""


@pytest.mark.parametrize("shape", range(SHAPES))
def test_whatever_goes_wrong_a_run_ends_with_the_digests_of_an_undisturbed_one(shape: int) -> None:
    """Seeds of one shape together: its undisturbed run is needed in one process only."""
    plans = [Plan.of(seed) for seed in range(shape, SEEDS, SHAPES)]
    judged = [judge(plan) for plan in plans]
    assert not {plan.seed: said for plan, (said, _) in zip(plans, judged, strict=True) if said}
    drawn = sum(len(plan.faults) + len(plan.ends) for plan in plans)
    assert sum(len(missed) for _, missed in judged) < drawn / 5  # else a world in which little happens would do as well


def test_a_seed_replays_its_run_to_the_same_trace() -> None:
    disturbed = next(plan for plan in map(Plan.of, range(100)) if len(plan.faults) == 3 and plan.ends)
    first, second = run(disturbed), run(disturbed)
    assert first.happened
    assert first.trace == second.trace


def test_every_kind_of_fault_hits_runs_of_these_seeds() -> None:
    """Else a test that nothing goes wrong in would be passed as well."""
    plans = [Plan.of(seed) for seed in range(SEEDS)]
    drawn = {(fault.role, fault.kind) for plan in plans for fault in (*plan.faults, *plan.ends)}
    assert drawn == {(role, kind) for role, kinds in KINDS.items() for kind in kinds} | set(ENDS)
    assert any(plan.scales for plan in plans)
    assert {plan.shape.together for plan in plans} == {False, True}
    pruned = [plan.shape for plan in plans if plan.shape.prune != "null"]
    assert {shape.unit == 4 * shape.units for shape in pruned} == {False, True}
    assert any(shape.staleness for shape in pruned)


def test_faults_happen_and_are_survived() -> None:
    shape = SMALL
    faults = (
        Fault("explorer", 8, "dies before"),
        Fault("selector", 6, "dies after"),
        Fault("learner", 9, "hangs"),
        Fault("node", 60, "dies"),
    )
    ended = run(Plan(1, shape, explorers=2, regenerators=1, ranks=1, nodes=2, faults=faults))
    happened = sorted(re.match(r"[a-z]+", each).group() for each in ended.happened)  # type: ignore[union-attr]
    assert happened == ["explorer", "learner", "node", "selector"]
    assert ended.digests == undisturbed(shape)
    assert not ended.errors


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize(("shape", "back"), [(ONCE, ["after 1 updates"]), (TWICE, ["after 1 updates"] * 2)])
def test_a_run_that_collapses_goes_back_and_a_kill_changes_nothing_of_that(
    shape: Shape, back: list[str], colocated: bool
) -> None:
    """These are the rollbacks of the undisturbed runs. The first is killed at its disk work all along."""
    calm = Plan(1, shape, explorers=1, regenerators=1, ranks=1, colocated=colocated)
    ended = run(calm)
    assert ended.digests is not None
    assert ended.digests[4] == str(len(back))  # which the state counts, and its steps grow smaller by
    told = [text for text in ended.told if "goes back" in text]
    assert [text.partition("the policy ")[2].partition(",")[0] for text in told] == back
    # Each makes the step smaller, counted by the records of those before.
    rates = [float(text.partition(" with ")[2].split()[0]) for text in told]
    assert rates == [0.5, 0.25][: len(back)]
    for call in range(20, 180, 8):
        ended = run(replace(calm, ends=(Fault("controller", call, "dies beside the disk"),)))
        assert ended.digests == undisturbed(shape), call


def test_a_run_goes_back_once_for_each_fall_if_some_iterations_are_not_evaluated() -> None:
    ended = run(Plan(1, RARELY, explorers=1, regenerators=1, ranks=1))
    assert ended.digests is not None
    # Updates; steps since the base, of the one update after the second return to it; returns.
    assert ended.digests[2:5] == ("6", "2", "2")
    told = [text.partition(" the policy ")[2] for text in ended.told if "goes back" in text]
    assert [text.partition(" of ")[0] for text in told] == [f"after 0 updates, with {step}" for step in (0.5, 0.25)]


def test_a_run_that_is_to_stop_at_a_collapse_stops_there_again_when_it_is_resumed() -> None:
    shape = replace(ONCE, on_collapse="stop")
    ended = run(Plan(1, shape, explorers=1, regenerators=1, ranks=1))
    assert ended.digests is None
    first, second = ended.errors
    assert first == second
    assert "run.on_collapse is stop" in first
    assert "/run/lora_best" in first


class Ranked(Shape):
    """With a floor that no iteration of this world reaches."""

    on_low = "stop"

    @property
    def settings(self) -> tuple[str, ...]:
        return (*super().settings, f"fidelity={{floor: 0.99, patience: 2, on_low: {self.on_low}}}")


class Warned(Ranked):
    on_low = "warn"


def test_a_run_that_is_to_stop_when_previews_rank_badly_does_so_after_its_checkpoint_and_again_when_resumed() -> None:
    sizes = asdict(replace(SMALL, iterations=4))
    ended = run(Plan(1, Ranked(**sizes), explorers=1, regenerators=1, ranks=1))
    assert ended.digests is None
    first, second = ended.errors
    assert first == second  # the second attempt made no further iteration
    assert first.startswith("fidelity.on_low is stop: previews rank badly: Spearman is ")
    assert "in iteration 2, and has been below fidelity.floor, 0.99, for 2 iterations" in first
    assert sum(line.endswith(" is sent update") for line in ended.trace) == 2


def test_a_run_that_warns_of_previews_that_rank_badly_does_so_once_and_ends_as_without_a_floor() -> None:
    shape = replace(SMALL, iterations=4)
    ended = run(Plan(1, Warned(**asdict(shape)), explorers=1, regenerators=1, ranks=1))
    assert not ended.errors
    assert ended.digests == undisturbed(shape)
    (said,) = [text for text in ended.told if "rank badly" in text]
    assert "in iteration 2" in said


class Tracked(Shape):
    """With trackers, which this world has none of: opening one fails."""

    @property
    def settings(self) -> tuple[str, ...]:
        return (*super().settings, "tracking.trackers=[wandb, trackio]")


def test_trackers_that_fail_change_nothing() -> None:
    shape = SMALL
    ended = run(Plan(1, Tracked(**asdict(shape)), explorers=2, regenerators=1, ranks=1))
    assert ended.digests == undisturbed(shape)
    assert not ended.errors


def test_a_report_that_cannot_be_made_ends_no_finished_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no font")

    monkeypatch.setattr(SimulatedWorld, "write_report", fails)
    shape = SMALL
    ended = run(Plan(1, shape, explorers=1, regenerators=1, ranks=1))
    assert ended.digests == undisturbed(shape)
    assert not ended.errors
    assert any("the report was not written: no font; `solrl report /run` writes it" in told for told in ended.told)


def test_a_simulated_run_leaves_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    """Also of a process that ends as pytest's workers do, without its own tidying."""
    code = "import os; from tests.simulated.runs import Plan, undisturbed; undisturbed(Plan.of(4).shape); os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (Fault("controller", 60, "dies"), ""),
        (Fault("disk", 150, "loses power"), ""),
        (Fault("disk", 150, "is full"), "No space left on device"),
        (Fault("controller", 20, "hangs at the disk"), "passed its deadline of"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_a_run_that_ends_on_the_way_says_why_and_goes_on(end: Fault, said: str) -> None:
    shape = SMALL
    ended = run(Plan(1, shape, explorers=1, regenerators=1, ranks=1, ends=(end,)))
    assert len(ended.happened) == 1
    assert [error for error in ended.errors if said in error] == ended.errors
    assert bool(ended.errors) == bool(said)
    assert ended.digests == undisturbed(shape)


def test_a_checkpoint_that_is_half_removed_is_none_to_go_back_to() -> None:
    """Power is lost while the first of three is removed; then the newest cannot be read any more."""
    shape = replace(ONCE, iterations=3, prompts=2, units=3, together=True)
    ends = (Fault("disk", 266, "loses power and a block"), Fault("disk", 34, "loses power and a block"))
    plan = Plan(439032, shape, explorers=2, regenerators=2, ranks=2, nodes=3, ends=ends, colocated=True)
    assert not violation(plan)


def test_after_a_damaged_checkpoint_a_run_that_explores_ahead_has_the_two_before() -> None:
    plan = Plan(2, replace(SMALL, iterations=4, staleness=1), explorers=1, regenerators=1, ranks=1)
    told: list[str] = []
    for operation in range(300, 348, 8):
        ended = run(replace(plan, ends=(Fault("disk", operation, "loses power and a block"),)))
        assert ended.digests == undisturbed(plan.shape)
        assert not ended.errors
        told += ended.told
    assert any("the checkpoint after 3 updates is skipped" in text for text in told)


@pytest.mark.parametrize("faults", [(), ("dies before", "hangs"), ("dies after", "dies before")])
def test_learners_compile_before_their_first_update_and_so_do_those_that_replace_them(faults: tuple[str, ...]) -> None:
    """`players.Learner` refuses an update before it has compiled, and to compile twice."""
    shape = SMALL
    for calls in ((4, 6), (7, 14), (10, 12), (11, 25)):
        at = tuple(Fault("learner", call, kind) for call, kind in zip(calls, faults, strict=False))
        ended = run(Plan(1, shape, explorers=2, regenerators=1, ranks=2, faults=at, compiled=True))
        assert len(ended.happened) == len(faults)
        assert any("learner" in line and "warm_up" in line for line in ended.trace)
        assert ended.digests == undisturbed(shape)
        assert not ended.errors


WHOLE = Shape(
    iterations=2,
    prompts=2,
    units=3,
    staleness=0,
    every=0,
    strategy="two_stage",
    unit=12,
    prune="{after: 1, keep: 6}",
)
"""A pool is one unit, of three micro-batches, that is pruned."""


def test_a_unit_that_is_three_micro_batches_may_take_three_times_as_long() -> None:
    """One of them, slow, takes 43.5 s; `DEADLINES` has 15 for a micro-batch."""
    taken = []
    for seed in range(20):
        faults = tuple(Fault("explorer", call, "is slow") for call in (5, 6, 7, 8))
        ended = run(Plan(seed, WHOLE, explorers=1, regenerators=1, ranks=1, faults=faults))
        taken += [name for name in ended.happened if "explore" in name.partition(" at ")[2]]
        assert ended.digests == undisturbed(WHOLE)
        assert not any("dies" in line or "was lost" in line for line in ended.trace)
        assert not any("explorer-0.1" in line for line in ended.trace)  # nobody took its place
    assert len(taken) > 20


@pytest.mark.parametrize("kind", ["is slow", "dies before", "dies after", "hangs", "comes twice"])
def test_prompts_that_are_evaluated_together_are_lost_together_and_may_take_twice_as_long(kind: str) -> None:
    """A slow call takes 27 s; `DEADLINES` has 16 for a prompt."""
    shape, taken = replace(WHOLE, every=1, together=True), 0
    for call in range(4, 18):
        ended = run(Plan(1, shape, explorers=1, regenerators=1, ranks=1, faults=(Fault("regenerator", call, kind),)))
        assert ended.digests == undisturbed(shape)
        assert not ended.errors
        if any("evaluate" in each.partition(" at ")[2] for each in ended.happened):
            taken += 1
            replaced = any("regenerator-0.1" in line for line in ended.trace)
            assert replaced == (kind not in ("is slow", "comes twice"))
    assert taken >= 2


@pytest.mark.parametrize("kind", ["dies before", "dies after", "hangs", "answers NaN"])
def test_a_pruned_unit_is_repeated_whole_by_whoever_takes_it(kind: str) -> None:
    for call in (5, 6, 7, 8):
        faults = (Fault("explorer", call, kind),)
        ended = run(Plan(1, WHOLE, explorers=2, regenerators=1, ranks=1, faults=faults))
        assert len(ended.happened) == 1
        assert ended.digests == undisturbed(WHOLE)
        assert not ended.errors


@pytest.mark.parametrize("role", ["explorer", "regenerator", "learner"])
@pytest.mark.parametrize("kind", ["dies before", "dies after", "hangs"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_card_that_is_lost_in_any_of_its_stages_loses_all_its_roles_and_changes_nothing(
    role: str, kind: str, ranks: int
) -> None:
    """It costs one replacement, and the user is told of it once."""
    plan = Plan(1, SMALL, explorers=ranks, regenerators=ranks, ranks=ranks, colocated=True)
    calls = [
        line.rpartition(" ")[2] for line in run(plan).trace if line.rpartition(f" {role}-")[1] and " is sent " in line
    ]
    stages = {method: call for call, method in enumerate(calls, start=1)}
    assert {"explore", "regenerate", "update", "shard", "load_revision"} & set(stages)
    for method, call in stages.items():
        ended = run(replace(plan, faults=(Fault(role, call, kind),)))
        assert not ended.errors
        assert ended.digests == undisturbed(plan.shape), (method, ended.happened)
        lost = [text for text in ended.told if " was lost (" in text]
        assert len(lost) <= 1, lost  # none if it was lost after the last update
        assert all(text.startswith("card-") for text in lost)


def test_a_rebuilt_group_learns_before_other_roles_of_a_new_card_start() -> None:
    plan = Plan(1, replace(SMALL, prompts=3), explorers=2, regenerators=2, ranks=2, colocated=True)
    calls = [line for line in run(plan).trace if " learner-" in line and " is sent " in line]
    update = next(call for call, line in enumerate(calls, start=1) if line.endswith(" update"))
    ended = run(replace(plan, faults=(Fault("learner", update, "dies before"),)))
    sent = [line.partition(" ")[2] for line in ended.trace if " is sent " in line]
    learned = sent.index("learner-0.1 is sent update")
    assert learned < min(sent.index(f"{role}-0.1 is sent start") for role in ("explorer", "regenerator"))


def test_a_run_whose_last_checkpoint_is_lost_after_its_end_is_evaluated_again_though_it_is_cut_off_before() -> None:
    """The last update is made again, and a second driver ends in that."""
    shape = replace(SMALL, iterations=3, staleness=1, prune="null")
    ends = (Fault("disk", 290, "loses power and a block"), Fault("controller", 46, "hangs at the disk"))
    assert not violation(Plan(1322571, shape, explorers=1, regenerators=1, ranks=1, nodes=2, ends=ends))


def test_a_card_that_dies_after_its_answer_while_others_still_learn_costs_one_replacement() -> None:
    shape = replace(SMALL, prompts=3, unit=4, prune="null")
    calm = Plan(1, shape, explorers=1, regenerators=2, ranks=2, nodes=3, colocated=True)
    for seed, call in ((2106534, 56), (2110452, 60)):
        plan = replace(calm, seed=seed, faults=(Fault("node", call, "dies"),))
        assert any(" dies" in each for each in run(plan).happened)
        assert not violation(plan)


@pytest.mark.parametrize(("call", "scaled"), [(3, 30), (4, 32), (6, 44), (8, 42), (8, 44)])
def test_a_pool_that_is_made_smaller_while_a_card_is_replaced_keeps_the_explorer_of_the_card(
    call: int, scaled: int
) -> None:
    """It is waiting for its place then. The others need packed weights, of which fewer explorers get none."""
    faults, scales = (Fault("regenerator", call, "dies after"),), ((scaled, "explorers", 1),)
    plan = Plan(1, SMALL, explorers=3, regenerators=1, ranks=1, colocated=True)
    ended = run(replace(plan, faults=faults, scales=scales))
    assert ended.digests == undisturbed(plan.shape)
    left = [text.split()[0] for text in ended.told if text.endswith("leaves after its present units")]
    assert left == ["explorer-2", "explorer-1"]


def test_a_worker_that_is_lost_again_as_it_starts_is_left_out_and_costs_no_third_start() -> None:
    """The second explorer is asked for when the first is at work."""
    plan = Plan(1, SMALL, explorers=1, regenerators=1, ranks=1, scales=((30, "explorers", 2),))
    again = 0
    for call in range(4, 12):
        ended = run(replace(plan, faults=(Fault("explorer", call, "dies before"),) * 2))
        assert ended.digests == undisturbed(plan.shape)
        starting = [re.fullmatch(r"(explorer-1\S*) dies before at (node|start)", each) for each in ended.happened]
        left_out = [text.split()[0] for text in ended.told if "cannot work with the others" in text]
        assert left_out == (["explorer-1.1"] if all(starting) else [])
        assert not left_out or not any("explorer-1.2" in line for line in ended.trace)
        again += all(starting)
    assert again
