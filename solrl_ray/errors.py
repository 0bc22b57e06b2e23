"""The errors, by who can fix them: bad input, or a run that cannot go on. A message is one sentence naming key, file
and value.
"""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The command line prints only the message, without a traceback, and exits with status 2."""


class NotYetThere(UserError):
    """Something outside that a run needs and that can still be provided; a plan does without."""


class MissingCheckpoint(NotYetThere):
    """A checkpoint that this machine has not downloaded yet. The message has the command."""


class SilentServer(NotYetThere):
    """A reward server or judge that does not answer yet."""


class RunError(Exception):
    """A run that cannot go on: receipts that disagree, a worker lost too often, a missed deadline."""


class RewardError(RunError):
    """A reward failed, or returned the wrong number of values or one that is not finite."""


class NonsenseError(RunError):
    """A worker's answer that cannot be right: a value that is not finite, another unit, another revision.

    Another worker gets the unit before the run is considered at fault.
    """


class NotFiniteError(NonsenseError, ValueError):
    """NaN or infinity where arithmetic cannot represent it."""


class RewardNonsense(RewardError, NonsenseError):
    """A reward that is not finite, or pictures that are none."""


class Gone(RunError):
    """A call that will never be answered, though it may succeed elsewhere."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what = what
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.what} failed: {self.reason}"


class WorkerGone(Gone):
    """The worker died, cannot be reached, or did not answer in time."""


class Unreachable(WorkerGone):
    """The connection to the worker or its node broke; its process may be well."""


class Late(WorkerGone):
    """The worker did not answer in time."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(what, f"no answer within its deadline of {seconds:g} s")
        self.args = (what, seconds)  # with which pickle makes it again
        self.seconds = seconds


class PeerGone(Gone):
    """Another rank of the learner group is lost; the worker itself is well."""


class InputGone(Gone):
    """An argument of the call by reference is lost; the worker itself is well."""


class Leaving(RunError):
    """A worker was told to end; its work goes to others."""
