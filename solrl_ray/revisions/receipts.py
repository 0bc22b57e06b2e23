"""Whether receivers hold what was published (design law 4)."""

from __future__ import annotations

from collections.abc import Iterable

from solrl_ray.errors import RunError
from solrl_ray.records import Receipt
from solrl_ray.revisions.payload import Expected, Revision

REMEMBERED = 4
"""Revisions whose late receipts can still be judged."""


def check(receipts: Iterable[Receipt], revision: Revision) -> None:
    """Judges all receipts of one revision.

    Raises:
        RunError: naming the first worker whose receipt is not what it must be; or there are no receipts.
    """
    book, count = ReceiptBook(), 0
    book.expect(revision)
    for receipt in receipts:
        book.check(receipt)
        count += 1
    if not count:
        raise RunError(f"no receiver proved that it holds {revision.name}")


class ReceiptBook:
    """Judges receipts one by one as they arrive, in whatever order.

    A receipt must name a published revision, at least one bound module, the module count and buffer digest
    that the revision states for the worker's role, and the probe digest of the first worker of its score
    class.
    """

    def __init__(self) -> None:
        self._expected: dict[int, dict[str, list[Expected]]] = {}
        self._probes: dict[tuple[int, str, str], tuple[str, str]] = {}

    def expect(self, revision: Revision) -> None:
        """From now on receipts for `revision` are judged; the oldest revisions are forgotten."""
        roles = self._expected.setdefault(revision.revision, {})
        for role, expected in revision.expected.items():
            known = roles.setdefault(role, [])
            if expected not in known:
                known.append(expected)
        for number in sorted(self._expected)[:-REMEMBERED]:
            del self._expected[number]
            self._probes = {key: probe for key, probe in self._probes.items() if key[0] != number}

    def check(self, receipt: Receipt) -> None:
        """Raises `RunError` with what the receipt says and what it should say."""
        who = f"{receipt.worker} ({receipt.role})"
        roles = self._expected.get(receipt.revision)
        if roles is None or receipt.role not in roles:
            raise RunError(
                f"{who} says it holds revision {receipt.revision}, which was not published for its role"
            )
        if receipt.bound_modules < 1:
            raise RunError(f"{who} bound no module of revision {receipt.revision}")
        held = Expected(modules=receipt.bound_modules, digest=receipt.buffer_digest)
        if held not in roles[receipt.role]:
            wanted = " or ".join(f"{e.modules} modules, {e.digest[:12]}" for e in roles[receipt.role])
            raise RunError(
                f"{who} does not hold revision {receipt.revision}: its receipt states {held.modules} "
                f"modules, {held.digest[:12]}; published were {wanted}"
            )
        key = (receipt.revision, receipt.buffer_digest, receipt.score_class)
        first, probe = self._probes.setdefault(key, (receipt.worker, receipt.probe_digest))
        if probe != receipt.probe_digest:
            raise RunError(
                f"{who} and {first} hold the same revision {receipt.revision} and are of one score class, "
                f"but their probe forwards differ: {receipt.probe_digest[:12]} and {probe[:12]}"
            )
