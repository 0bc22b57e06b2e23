import pytest

from solrl_ray.scheduling.worker_state import (
    State,
    advance,
    leavers,
    pool_of,
    replacement_name,
    role_of,
    slot_of,
    worker_name,
)

EVENTS = ("placed", "started", "proved", "outdated", "leave", "lost")


def test_a_worker_counts_only_after_it_was_placed_started_and_proved_its_revision() -> None:
    state = State.WAITING
    for event in ("placed", "started", "proved"):
        assert state is not State.READY
        state = advance(state, event)
    assert state is State.READY


def test_a_new_revision_makes_everybody_stale_again() -> None:
    assert advance(State.READY, "outdated") is State.STALE
    assert advance(State.STALE, "outdated") is State.STALE
    assert advance(State.STARTING, "outdated") is State.STARTING
    assert advance(State.WAITING, "outdated") is State.WAITING


@pytest.mark.parametrize("event", EVENTS)
def test_there_is_no_way_back_from_dead(event: str) -> None:
    with pytest.raises(ValueError, match=f"a worker that is dead cannot become {event}"):
        advance(State.DEAD, event)


@pytest.mark.parametrize("state", [state for state in State if state is not State.DEAD])
def test_who_is_to_leave_never_gets_work_again(state: State) -> None:
    leaving = advance(state, "leave")
    assert leaving is State.DRAINING
    for event in EVENTS[:-1]:
        assert advance(leaving, event) is State.DRAINING
    assert advance(leaving, "lost") is State.DEAD


@pytest.mark.parametrize(
    ("state", "event"), [(State.STARTING, "proved"), (State.WAITING, "started"), (State.READY, "started")]
)
def test_nothing_can_be_skipped(state: State, event: str) -> None:
    with pytest.raises(ValueError, match=f"{state.value} cannot become {event}"):
        advance(state, event)


def test_replacements_keep_the_slot_and_count_generations() -> None:
    assert replacement_name("explorer-2") == "explorer-2.1"
    assert replacement_name("explorer-2.1") == "explorer-2.2"
    assert (slot_of("explorer-2"), slot_of("explorer-12.1")) == (2, 12)


@pytest.mark.parametrize(
    ("pool", "name", "role"),
    [
        ("explorers", "explorer-2", "explorer"),
        ("regenerators", "regenerator-2", "regenerator"),
    ],
)
def test_a_name_says_role_and_pool_also_of_a_replacement(pool: str, name: str, role: str) -> None:
    assert worker_name(pool, 2) == name
    for worker in (name, replacement_name(name)):
        assert (role_of(worker), pool_of(worker), slot_of(worker)) == (role, pool, 2)


def test_who_waits_for_a_place_leaves_first_then_the_newest() -> None:
    states = {
        "explorer-0": State.READY,
        "explorer-1.1": State.WAITING,
        "explorer-2": State.STALE,
        "explorer-3": State.DRAINING,
        "explorer-10": State.READY,
    }
    assert leavers(states, 2) == ["explorer-1.1", "explorer-10"]
    assert leavers(states, 9) == ["explorer-1.1", "explorer-10", "explorer-2", "explorer-0"]
    assert leavers(states, 0) == leavers(states, -1) == []  # the pool grows


def test_who_is_on_a_card_leaves_last_even_if_it_waits_for_its_place() -> None:
    states = {"explorer-0.1": State.WAITING, "explorer-1": State.READY, "explorer-2": State.WAITING}
    assert leavers(states, 3, {"explorer-0.1"}) == ["explorer-2", "explorer-1", "explorer-0.1"]
    assert leavers(states, 3) == ["explorer-2", "explorer-0.1", "explorer-1"]
