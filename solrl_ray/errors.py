"""Errors: `UserError` for input that the user can fix, `RunError` for a run that cannot continue.

A message is one sentence that names key, file and value.
"""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The command line prints only the message, without a traceback, and exits with status 2."""


class NotYetThere(UserError):
    """An external thing that a run needs is missing, but can still be provided. A plan does not need it."""


class MissingCheckpoint(NotYetThere):
    """A checkpoint is not downloaded to this machine yet. The message has the command."""


class SilentServer(NotYetThere):
    """A reward server or judge does not answer yet."""


class RunError(Exception):
    """The run cannot continue: receipts disagree, a worker was lost too often, a deadline was missed."""


class RewardError(RunError):
    """A reward failed, or returned the wrong number of values or one that is not finite."""


class NonsenseError(RunError):
    """A worker's answer is invalid: a value is not finite, or it is for another unit or revision.

    Another worker gets the unit before the run is considered at fault.
    """


class NotFiniteError(NonsenseError, ValueError):
    """NaN or infinity in an arithmetic that cannot represent it."""


class RewardNonsense(RewardError, NonsenseError):
    """A reward is not finite, or its input is not valid images."""


class Gone(RunError):
    """A call will never be answered, but may succeed on another worker."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what = what
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.what} failed: {self.reason}"


class WorkerGone(Gone):
    """The worker died, cannot be reached, or did not answer in time."""


class Unreachable(WorkerGone):
    """The connection to the worker or its node broke; its process may still run."""


class Late(WorkerGone):
    """The worker did not answer in time."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(what, f"no answer within its deadline of {seconds:g} s")
        self.args = (what, seconds)  # arguments with which pickle recreates it
        self.seconds = seconds


class PeerGone(Gone):
    """Another rank of the learner group is lost; this worker still runs."""


class InputGone(Gone):
    """An argument that was passed by reference is lost; the worker still runs."""


class Leaving(RunError):
    """A worker was asked to end; its work goes to other workers."""
