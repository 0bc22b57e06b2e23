import pytest

from solrl_ray.scheduling.fleet import State, advance, replacement_name


def test_a_worker_counts_only_after_it_started_and_proved_its_revision() -> None:
    state = advance(State.STARTING, "started")
    assert state is State.STALE
    assert advance(state, "proved") is State.READY


def test_a_new_revision_makes_everybody_stale_again() -> None:
    assert advance(State.READY, "outdated") is State.STALE
    assert advance(State.STALE, "outdated") is State.STALE
    assert advance(State.STARTING, "outdated") is State.STARTING


@pytest.mark.parametrize("event", ["started", "proved", "outdated", "lost"])
def test_there_is_no_way_back_from_dead(event: str) -> None:
    with pytest.raises(ValueError, match=f"a worker that is dead cannot become {event}"):
        advance(State.DEAD, event)


def test_proving_cannot_be_skipped() -> None:
    with pytest.raises(ValueError, match="starting cannot become proved"):
        advance(State.STARTING, "proved")
    with pytest.raises(ValueError, match="lent cannot become proved"):
        advance(State.LENT, "proved")


def test_a_lent_worker_stays_lent_through_new_revisions_and_must_prove_one_when_it_is_back() -> None:
    state = advance(advance(State.READY, "lent"), "outdated")
    assert state is State.LENT
    assert advance(state, "returned") is State.STALE
    with pytest.raises(ValueError, match="stale cannot become lent"):
        advance(State.STALE, "lent")


def test_replacements_keep_the_slot_and_count_generations() -> None:
    assert replacement_name("explorer-2") == "explorer-2.1"
    assert replacement_name("explorer-2.1") == "explorer-2.2"
