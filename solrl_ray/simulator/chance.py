"""Randomness in a simulated run: addressed random numbers, so that equal scenarios give equal results. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache

from solrl_ray.records import Address, WorkUnit
from solrl_ray.sampling.noise import standard_normal, uniform
from solrl_ray.simulator.scenario import Scenario


class Chance:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._factors: defaultdict[int, dict[str, list[float]]] = defaultdict(dict)
        """By iteration, then by prompt."""

    def is_slow(self, worker: str) -> bool:
        """Whether a worker is a straggler."""
        share = self._scenario.disturbances.slow_share
        return share > 0 and float(uniform(self._of_worker("simulated-straggler", worker), (1,))[0]) < share

    def life(self, worker: str) -> float:
        """Seconds that a worker lives."""
        mtbf = self._scenario.disturbances.mtbf
        return _exponential(self._of_worker("simulated-failure", worker), mtbf) if math.isfinite(mtbf) else math.inf

    def learners_life(self, iteration: int, attempt: int) -> float:
        """Seconds from the start of an update until a learner rank fails."""
        scenario = self._scenario
        if not math.isfinite(scenario.disturbances.mtbf):
            return math.inf
        address = self._address("simulated-learner-failure", iteration, step=attempt)
        return _exponential(address, scenario.disturbances.mtbf / scenario.learners)

    def factor(self, unit: WorkUnit) -> float:
        """A unit's time relative to the usual one: log-normal with mean 1, a function of the unit alone."""
        spread, scenario = self._scenario.disturbances.spread, self._scenario
        if spread == 0:
            return 1.0
        units, factors = scenario.pool // scenario.unit, self._factors[unit.iteration]
        if unit.prompt_id not in factors:
            address = self._address("simulated-seconds", unit.iteration, prompt_id=unit.prompt_id)
            normals = standard_normal(address, (units + 1,)).tolist()
            factors[unit.prompt_id] = [math.exp(spread * z - spread * spread / 2) for z in normals]
        position = units if unit.stage == "regenerate" else unit.indices[0] // scenario.unit
        return factors[unit.prompt_id][position]

    def rewards(self, unit: WorkUnit) -> tuple[float, ...]:
        """Rewards of all candidates of a unit's prompt."""
        address = self._address("simulated-reward", unit.iteration, prompt_id=unit.prompt_id)
        return _rewards(address, self._scenario.pool)

    def forget(self, iteration: int) -> None:
        """Forget a finished iteration."""
        self._factors.pop(iteration, None)

    def _of_worker(self, purpose: str, worker: str) -> Address:
        return Address(run_seed=self._scenario.seed, purpose=purpose, prompt_id=worker)

    def _address(self, purpose: str, iteration: int, *, prompt_id: str = "", step: int = 0) -> Address:
        return Address(
            run_seed=self._scenario.seed,
            purpose=purpose,
            iteration=iteration,
            prompt_id=prompt_id,
            step=step,
        )


@lru_cache(maxsize=4096)
def _rewards(address: Address, count: int) -> tuple[float, ...]:
    """Cached, because a forecast simulates one run on several fleets: drawing took a sixth of its time."""
    return tuple(uniform(address, (count,)).astype("float32").tolist())


def _exponential(address: Address, mean: float) -> float:
    return -mean * math.log(float(uniform(address, (1,))[0]))
