"""Compares workers' receipts with the published revision, and ends the run if they differ (design law 4)."""

from __future__ import annotations

from solrl_ray.errors import RunError
from solrl_ray.records import Receipt
from solrl_ray.weight_sync.manifest import Expected, Manifest

REMEMBERED = 4
"""Number of newest revisions whose receipts can still be checked."""


class ReceiptBook:
    """Checks receipts one by one as they arrive, in any order.

    A receipt must name a published revision and at least one bound module. Module count and buffer digest must be those
    that the revision states for the worker's role. If the worker's kernels are reproducible, its probe digest must be
    that of the first worker of its score class.
    """

    def __init__(self) -> None:
        self._expected: dict[tuple[str, int], dict[str, Expected]] = {}
        self._probes: dict[tuple[tuple[str, int], str, str], tuple[str, str]] = {}

    def expect(self, revision: Manifest) -> None:
        """Check receipts for `revision` from now on; forget the oldest revisions."""
        name = (revision.policy, revision.revision)
        self._expected.pop(name, None)  # keep the newest one last
        self._expected[name] = dict(revision.expected)
        for forgotten in list(self._expected)[:-REMEMBERED]:
            del self._expected[forgotten]
            self._probes = {key: probe for key, probe in self._probes.items() if key[0] != forgotten}

    def check(self, receipt: Receipt) -> None:
        """Raises `RunError` with the receipt's value and the expected one."""
        worker = f"{receipt.worker} ({receipt.role})"
        name = (receipt.policy, receipt.revision)
        expected = self._expected.get(name, {}).get(receipt.role)
        if expected is None:
            raise RunError(f"{worker} reports {_shown(name)}, which was not published for its role")
        if receipt.bound_modules < 1:
            raise RunError(f"{worker} bound no module of {_shown(name)}: none of its weights was updated")
        held = Expected(modules=receipt.bound_modules, digest=receipt.buffer_digest)
        if held != expected:
            raise RunError(
                f"{worker} does not hold {_shown(name)}: its receipt states {held.modules} modules, "
                f"{held.digest[:12]}; published were {expected.modules} modules, {expected.digest[:12]}"
            )
        if not receipt.reproducible:  # compilers time reductions to choose one: equal weights, other roundings
            return
        key = (name, receipt.role, receipt.score_class)
        first, probe = self._probes.setdefault(key, (receipt.worker, receipt.probe_digest))
        if probe != receipt.probe_digest:
            raise RunError(
                f"{worker} and {first} both hold {_shown(name)} and have the same score class, "
                f"but their probe forwards differ: {receipt.probe_digest[:12]} and {probe[:12]}"
            )


def _shown(name: tuple[str, int]) -> str:
    policy, revision = name
    return f"revision {revision}" if policy == "old" else f"{policy} after {revision} updates"
