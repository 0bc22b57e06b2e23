from published_evaluation import due


def test_each_twentieth_policy_is_due_and_the_last_one() -> None:
    assert due([0, 20, 40, 57, 58], 20) == [20, 40, 58]
    assert due([0], 20) == []
    assert due([3], 20) == [3]
