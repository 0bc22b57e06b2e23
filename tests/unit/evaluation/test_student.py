"""Student's t distribution, against published tables."""

from __future__ import annotations

import pytest

from solrl_ray.evaluation.student import student_quantile


def test_the_interval_has_students_quantile() -> None:
    # Published tables of t(0.975).
    for freedom, quantile in ((1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (47, 2.0117)):
        assert student_quantile(freedom) == pytest.approx(quantile, abs=1e-4)
