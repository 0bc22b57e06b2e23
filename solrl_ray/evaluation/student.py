"""Student's t distribution: quantiles for confidence intervals of a mean."""

from __future__ import annotations

import math

CONFIDENCE = 0.95


def student_quantile(freedom: int, mass: float = CONFIDENCE) -> float:
    """Two-sided quantile of Student's t with `freedom` >= 1 degrees of freedom: abs(t) is below it with probability
    `mass`.

    Source: Abramowitz and Stegun 26.7.3 and 26.7.4, closed forms for whole degrees of freedom, inverted by bisection.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_mass(middle, freedom) < mass else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _student_mass(theta: float, freedom: int) -> float:
    """Probability of abs(t) < sqrt(freedom) tan(theta)."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term = total = (cosine if freedom > 1 else 0.0) if odd else 1.0
    for k in range(2 if odd else 1, freedom - 1, 2):
        term *= k / (k + 1) * cosine**2
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
