"""Simulated runs, against schedules worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from solrl_ray.errors import RunError
from solrl_ray.rollout.selection import selection_digest
from solrl_ray.simulator.records import SimulatedIteration
from solrl_ray.simulator.scenario import Disturbances, Network, Orchestration, Scenario, Stages
from solrl_ray.simulator.simulation import Simulation


def scenario(explorers: int = 1, regenerators: int | None = None, **changes: object) -> Scenario:
    """8 prompts × 2 explore units, stages of 1 s."""
    made = Scenario(
        prompts=8,
        pool=8,
        keep=4,
        unit=4,
        explorers=explorers,
        regenerators=regenerators or explorers,
        stages=Stages(explore=1.0, regenerate=1.0, update=1.0),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def simulate(made: Scenario, iterations: int = 1) -> list[SimulatedIteration]:
    return list(Simulation(made).run(iterations))


@pytest.mark.parametrize(("explorers", "seconds"), [(1, 18.0), (2, 10.0), (4, 6.0), (16, 3.0)])
def test_without_costs_an_iteration_is_the_previews_the_last_regeneration_and_the_update(
    explorers: int, seconds: float
) -> None:
    # 16 units on n explorers, then one regeneration (others overlap with exploring), then the update. With 16, all
    # eight regenerations are side by side.
    assert simulate(scenario(explorers))[0].seconds == pytest.approx(seconds)


def test_one_regenerator_for_many_explorers_is_what_everybody_waits_for() -> None:
    # First selection after 1 s, then eight regenerations in a row, then the update.
    assert simulate(scenario(16, 1))[0].seconds == pytest.approx(1 + 8 + 1)


def test_in_one_stage_nothing_is_regenerated() -> None:
    iteration = simulate(scenario(2, one_stage=True))[0]
    assert iteration.seconds == pytest.approx(16 / 2 + 1)
    assert (iteration.closed.counts.groups, iteration.busy["regenerator"]) == (8, 0)


@pytest.mark.parametrize("together", [{"cards": 1}, {"shared": True}])
def test_on_one_card_exploring_and_regenerating_add_up(together: dict[str, Any]) -> None:
    assert simulate(scenario(1, **together))[0].seconds == pytest.approx(16 + 8 + 1)


def test_a_card_merges_a_revision_while_others_wait_for_it_to_arrive() -> None:
    stages = Stages(explore=1.0, regenerate=1.0, update=1.0, load=2.0, merge=0.5)
    network = Network(payload=1e9, bandwidth=1e9, workers_per_node=1, fanout=1)
    card = scenario(1, cards=1, stages=stages, network=network)
    assert simulate(card)[0].seconds == pytest.approx(0.5 + 16 + 8 + 1)
    # The other explorer's node has it after 1 s, and it needs 2 s more: 2.5 units less than the card, which has 16 and
    # the 8 of regenerating.
    beside = simulate(replace(card, explorers=2, staged=True))[0]
    assert beside.explored == pytest.approx(0.5 + 9.5, abs=0.51)


def test_a_card_that_is_lost_loses_its_roles_together_and_counts_once() -> None:
    made = scenario(2, cards=2, learners=2, disturbances=Disturbances(mtbf=60.0, restart=5.0))
    simulation = Simulation(made)
    lost = [iteration.lost for iteration in simulation.run(6)]
    workers = simulation._workers
    replaced = {role: sorted(workers[role]) for role in workers}
    assert sum(lost) > 0
    assert [name.removeprefix("explorer") for name in replaced["explorer"]] == [
        name.removeprefix("regenerator") for name in replaced["regenerator"]
    ]
    died = sum(int(name.partition(".")[2] or 0) for name in replaced["explorer"])
    assert died > 0
    assert died <= sum(lost) <= died + 6  # and learner ranks in six updates of a second


def test_the_selection_does_not_depend_on_the_fleet_nor_on_failures() -> None:
    calm = simulate(scenario(1), 2)
    other = simulate(
        scenario(
            5,
            2,
            disturbances=Disturbances(spread=0.5, slow_share=0.4, slow_factor=3.0, mtbf=5.0, restart=1.0),
            stages=Stages(explore=1.0, regenerate=1.0, update=0.1),
        ),
        2,
    )
    assert sum(iteration.lost for iteration in other) > 0
    assert sum(iteration.requeued for iteration in other) > 0
    for one, two in zip(calm, other, strict=True):
        assert selection_digest(one.closed.selections) == selection_digest(two.closed.selections)
        assert one.closed.counts.candidates == two.closed.counts.candidates == 64
    assert selection_digest(calm[0].closed.selections) != selection_digest(calm[1].closed.selections)


def test_equal_scenarios_give_equal_times_and_another_seed_another_time() -> None:
    made = scenario(3, disturbances=Disturbances(spread=0.3, mtbf=20.0, restart=2.0))
    assert simulate(made, 3) == simulate(made, 3)
    assert simulate(made, 3) != simulate(replace(made, seed=1), 3)


def test_workers_are_busy_for_as_long_as_their_units_take() -> None:
    busy = simulate(scenario(3, 2, stages=Stages(explore=0.5, regenerate=2.0, update=1.0)))[0].busy
    assert (busy["explorer"], busy["regenerator"]) == (pytest.approx(16 * 0.5), pytest.approx(8 * 2.0))


def test_the_parts_of_an_iteration_make_up_its_seconds() -> None:
    stages = Stages(explore=1.0, regenerate=1.0, update=1.0, checkpoint=0.25, publication=0.5, load=2.0)
    iteration = simulate(scenario(4, stages=stages))[0]
    assert iteration.publish == pytest.approx(0.5)  # the checkpoint is written while the fleet is at work
    assert iteration.rollout == pytest.approx(2.0 + 4.0 + 1.0)
    assert iteration.explored == pytest.approx(2.0 + 4.0)
    assert iteration.publish + iteration.rollout + iteration.update == pytest.approx(iteration.seconds)


def test_a_fleet_of_stragglers_takes_their_factor_longer() -> None:
    slow = scenario(4, disturbances=Disturbances(slow_share=1.0, slow_factor=10.0))
    assert simulate(slow)[0].rollout == pytest.approx(10 * 5.0)


def test_a_selector_that_takes_a_second_a_result_sets_the_pace_while_the_controller_has_nothing_to_do() -> None:
    # 16 explorers answer at once after 1 s; 16 × 1 s of recording is then all that counts, but for the last
    # prompt's regeneration and the update.
    made = scenario(16, orchestration=Orchestration(record=1.0))
    iteration = simulate(made)[0]
    assert iteration.explored == pytest.approx(1 + 16)
    assert iteration.busy["controller"] == 0
    assert iteration.seconds == pytest.approx(1 + 16 + 1 + 1)


def test_a_controller_that_takes_a_second_an_answer_sets_the_pace() -> None:
    # Answers are proofs of 16 explorers, and that the iteration is open; in the rollout proofs of 16 regenerators,
    # meanwhile 16 results, the selector's word on them; after a second of regenerating 8 groups, and the word on them.
    iteration = simulate(scenario(16, orchestration=Orchestration(answer=1.0)))[0]
    assert iteration.publish == pytest.approx(16 + 1)
    assert iteration.explored == pytest.approx(16 + 16 + 1)
    assert iteration.busy["controller"] == pytest.approx(16 + 16 + 1 + 8 + 1)
    assert iteration.rollout == pytest.approx(16 + 16 + 1 + 1 + 8 + 1)


def test_what_comes_while_the_selector_answers_goes_in_its_next_call() -> None:
    # Each call takes 2 s. Four results come while the iteration is opened and go together, and so do each four of the
    # others: four calls after the first, where one for each result would take 32 s.
    stages = Stages(explore=0.5, regenerate=100.0, update=1.0)
    iteration = simulate(scenario(1, stages=stages, orchestration=Orchestration(commit=2.0)))[0]
    assert iteration.publish + iteration.explored == pytest.approx(2 + 4 * 2)


def test_an_iteration_is_opened_while_the_revision_is_loaded_and_the_first_units_are_done() -> None:
    stages = Stages(explore=1.0, regenerate=1.0, update=1.0, load=5.0)
    for each, seconds in ((0.25, 5 + 1), (0.375, 16 * 0.375), (0.5, 16 * 0.5)):  # 16 units
        iteration = simulate(scenario(16, stages=stages, orchestration=Orchestration(open=each)))[0]
        assert iteration.publish + iteration.explored == pytest.approx(seconds)


def test_units_are_queued_beside_the_update_and_only_delay_what_is_longer() -> None:
    # 8 prompts with 16 units: 0.05 s and 0.025 s of each make 0.8 s, of the double 1.6 s beside an update of 1 s.
    for factor, update in ((1, 1.0), (2, 1.6)):
        costs = Orchestration(queue=factor * 0.025, embed=factor * 0.05)
        first, second = simulate(scenario(16, orchestration=costs), 2)
        assert (first.update, second.update) == pytest.approx((update, update))
        assert (first.publish + first.rollout, second.publish + second.rollout) == pytest.approx((2.0, 2.0))


def test_everybody_is_looked_at_five_times_a_second() -> None:
    # 1 + 1 workers, 18 s: each look adds to the time until the next one is due.
    looks = simulate(scenario(1, orchestration=Orchestration(worker=0.005)))[0].busy["controller"] / 0.01
    assert looks == pytest.approx(17, abs=1)  # one a result, as nothing else happens


def test_an_idle_worker_does_a_late_unit_as_well_and_nothing_else_changes() -> None:
    slow = scenario(4, disturbances=Disturbances(slow_share=0.3, slow_factor=20.0), seed=4)
    alone, hedged = simulate(slow, 3), simulate(replace(slow, hedge=3.0), 3)
    # One of the explorers needs 20 s a unit, and has two of them. They are late after 5 s, when the others, which have
    # done the other 14, do them as well. In what follows it is still at them, and the others do all 16.
    assert [(each.hedged, each.rollout) for each in alone] == [(0, 40 + 1)] * 3
    assert [(each.hedged, each.rollout) for each in hedged] == [(2, 6 + 1 + 1), (0, 6 + 1), (0, 6 + 1)]
    for one, two in zip(alone, hedged, strict=True):
        assert one.closed.selections == two.closed.selections
        assert two.closed.counts.violations == 0


def test_with_offloading_all_is_explored_before_anything_is_regenerated() -> None:
    made = scenario(1, cards=1)
    mixed, staged = simulate(made)[0], simulate(replace(made, staged=True))[0]
    assert (staged.explored, staged.rollout) == (pytest.approx(16), pytest.approx(16 + 8))
    assert mixed.explored > staged.explored
    assert mixed.rollout == pytest.approx(staged.rollout)


def test_a_queued_unit_hides_the_way_of_a_message() -> None:
    hop = Orchestration(hop=0.25)
    alone = simulate(scenario(1, max_inflight=1, orchestration=hop))[0].explored
    hidden = simulate(scenario(1, max_inflight=2, orchestration=hop))[0].explored
    # The revision's way there and its receipt's way back; then the way there, the units, and the way back.
    assert alone == pytest.approx(0.5 + 16 * (0.25 + 1 + 0.25))
    assert hidden == pytest.approx(0.5 + 0.25 + 16 + 0.25)


def test_all_who_have_proved_their_revision_meanwhile_have_one_unit_before_any_has_two() -> None:
    # A message takes 1 s. The selector is asked by 1 s, both are sent the revision by 3 s, when both proofs are there.
    # They are given first units by 4 and 5 s, second ones by 6 and 7 s. The later one ends its two of 10 s at 25 s; the
    # result is brought to the selector by 26 s.
    costs = Orchestration(load=1.0, call=1.0)
    made = scenario(2, prompts=2, stages=Stages(explore=10.0, regenerate=10.0, update=10.0), orchestration=costs)
    iteration = simulate(made)[0]
    assert iteration.publish == pytest.approx(1 + 2 + 4 + 2)  # and the revision to regenerators
    assert iteration.publish + iteration.explored == pytest.approx(26)


def test_what_a_worker_needs_between_units_is_added_to_each_but_the_last() -> None:
    assert simulate(scenario(1, orchestration=Orchestration(gap=0.25)))[0].explored == pytest.approx(16 + 15 * 0.25)


def test_a_result_costs_the_selector_by_its_candidates() -> None:
    costs = Orchestration(record=0.5, candidate=0.125)
    assert simulate(scenario(16, orchestration=costs))[0].explored == pytest.approx(1 + 16 * (0.5 + 4 * 0.125))


def test_holders_of_a_revision_multiply_in_a_broadcast() -> None:
    one = Network(payload=2e9, bandwidth=1e9, fanout=1)
    assert [one.arrival(node, 7) for node in range(7)] == [2, 4, 4, 6, 6, 6, 6]
    two = replace(one, fanout=2)
    assert [two.arrival(node, 8) for node in range(8)] == [4, 4, 8, 8, 8, 8, 8, 8]
    star = replace(one, fanout=100)
    assert [star.arrival(node, 7) for node in range(7)] == [14] * 7


def test_explorers_of_near_nodes_begin_while_the_revision_is_still_on_its_way() -> None:
    network = Network(payload=1e9, bandwidth=1e9, workers_per_node=1, fanout=1)
    # Nodes: explorers 0 and 1, then the regenerator, after 1, 2 and 2 s. One second's lead: 9 + 7 units.
    assert simulate(scenario(2, 1, network=network))[0].explored == pytest.approx(1 + 17 / 2, abs=0.51)


def test_a_lost_explorer_costs_its_open_units_and_its_restart() -> None:
    calm = sum(i.seconds for i in simulate(scenario(2), 4))
    failing = simulate(scenario(2, disturbances=Disturbances(mtbf=15.0, restart=5.0)), 4)
    assert sum(i.lost for i in failing) > 0
    assert sum(i.seconds for i in failing) > calm


def test_workers_that_fail_faster_than_they_finish_are_an_error() -> None:
    with pytest.raises(RunError, match=r"iteration 0 does not end: 5 workers with a mean of 0.01 s between failures"):
        simulate(scenario(2, disturbances=Disturbances(mtbf=0.01, restart=0.1)))


def test_more_workers_than_units_do_no_harm() -> None:
    assert simulate(scenario(500))[0].seconds == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("preview", "update", "without", "ahead"),
    [
        (3.0, 1.0, 8.0, 6.0),  # explorers set the pace: they never wait
        (1.0, 5.0, 8.0, 7.0),  # regenerators and learners do: nothing is left to explore when they begin
    ],
)
def test_exploring_ahead_hides_the_shorter_of_exploring_and_learning(
    preview: float, update: float, without: float, ahead: float
) -> None:
    stages = Stages(explore=preview, regenerate=1.0, update=update)
    for staleness, seconds in ((0, without), (1, ahead)):
        made = scenario(prompts=2, pool=4, keep=2, unit=4, stages=stages, max_staleness=staleness)
        iterations = list(Simulation(made).run(4))
        assert [i.seconds for i in iterations[2:]] == [seconds, seconds]
        assert all(i.closed.counts.candidates == 8 for i in iterations)


def test_with_staleness_regenerators_wait_for_their_revision() -> None:
    stages = Stages(explore=1.0, regenerate=1.0, update=1.0, publication=5.0, load=2.0)
    made = scenario(prompts=2, pool=4, keep=2, unit=4, stages=stages, max_staleness=1)
    assert [i.seconds for i in Simulation(made).run(4)][2:] == [10.0, 10.0]  # revision, load, two prompts, update


def test_staleness_does_not_change_what_is_selected() -> None:
    closed = [
        [i.closed.selections for i in Simulation(scenario(max_staleness=staleness)).run(3)] for staleness in (0, 1)
    ]
    chosen = [[[c.index for c in s.chosen] for made in run for s in made] for run in closed]
    assert chosen[0] == chosen[1]  # rewards are of no model here
