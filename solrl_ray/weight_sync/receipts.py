"""Compares workers' receipts with what was published, and ends the run if they differ (design law 4)."""

from __future__ import annotations

from solrl_ray.errors import RunError
from solrl_ray.records import Receipt
from solrl_ray.weight_sync.manifest import Expected, Manifest

REMEMBERED = 4
"""Revisions whose late receipts can still be checked."""


class ReceiptBook:
    """Checks receipts one by one as they arrive, in any order.

    A receipt must name a published revision, at least one bound module, the module count and buffer digest that the
    revision states for the worker's role, and, where kernels are reproducible, the probe digest of the first worker of
    its score class.
    """

    def __init__(self) -> None:
        self._expected: dict[tuple[str, int], dict[str, Expected]] = {}
        self._probes: dict[tuple[tuple[str, int], str, str], tuple[str, str]] = {}

    def expect(self, revision: Manifest) -> None:
        """From now on receipts for `revision` are checked; the oldest revisions are forgotten."""
        name = (revision.policy, revision.revision)
        self._expected.pop(name, None)  # the newest is last
        self._expected[name] = dict(revision.expected)
        for forgotten in list(self._expected)[:-REMEMBERED]:
            del self._expected[forgotten]
            self._probes = {key: probe for key, probe in self._probes.items() if key[0] != forgotten}

    def check(self, receipt: Receipt) -> None:
        """Raises `RunError` with the receipt's value and the right one."""
        worker = f"{receipt.worker} ({receipt.role})"
        name = (receipt.policy, receipt.revision)
        expected = self._expected.get(name, {}).get(receipt.role)
        if expected is None:
            raise RunError(f"{worker} says it holds {_shown(name)}, which was not published for its role")
        if receipt.bound_modules < 1:
            raise RunError(f"{worker} bound no module of {_shown(name)}")
        held = Expected(modules=receipt.bound_modules, digest=receipt.buffer_digest)
        if held != expected:
            raise RunError(
                f"{worker} does not hold {_shown(name)}: its receipt states {held.modules} modules, "
                f"{held.digest[:12]}; published were {expected.modules} modules, {expected.digest[:12]}"
            )
        if not receipt.reproducible:  # compilers choose reductions by timing them: equal weights, other roundings
            return
        key = (name, receipt.role, receipt.score_class)
        first, probe = self._probes.setdefault(key, (receipt.worker, receipt.probe_digest))
        if probe != receipt.probe_digest:
            raise RunError(
                f"{worker} and {first} both hold {_shown(name)} and are of one score class, "
                f"but their probe forwards differ: {receipt.probe_digest[:12]} and {probe[:12]}"
            )


def _shown(name: tuple[str, int]) -> str:
    policy, revision = name
    return f"revision {revision}" if policy == "old" else f"{policy} after {revision} updates"
