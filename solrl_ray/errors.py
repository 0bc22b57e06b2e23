"""What can go wrong, by whom it is to be mended. A message is one sentence naming key, file and value."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The command line prints the message alone, without a traceback, and exits with status 2."""


class NotYetThere(UserError):
    """Something outside that a run needs and that can still be brought; who only plans needs none."""


class MissingCheckpoint(NotYetThere):
    """A checkpoint that this machine has not fetched yet. The message has the command."""


class SilentServer(NotYetThere):
    """A reward server or judge that does not answer yet."""


class RunError(Exception):
    """A run that cannot go on: receipts that disagree, a worker lost too often, a deadline that passed."""


class RewardError(RunError):
    """A reward that failed, returned the wrong number of values, or returned one that is not finite."""


class NonsenseError(RunError):
    """A worker's answer that cannot be right: a value that is not finite, another unit, another revision.

    Another worker may do better: the work is given to one before the run is said to be at fault.
    """


class NotFiniteError(NonsenseError, ValueError):
    """NaN or infinity where arithmetic cannot carry it."""


class RewardNonsense(RewardError, NonsenseError):
    """A reward that is not finite, or pictures that are none."""


class Gone(RunError):
    """A call that nobody will answer any more, though it may succeed elsewhere."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what = what
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.what} failed: {self.reason}"


class WorkerGone(Gone):
    """The worker died, cannot be reached, or did not answer in time."""


class Late(WorkerGone):
    """The worker did not answer in time."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(what, f"no answer within its deadline of {seconds:g} s")
        self.args = (what, seconds)  # with which another process makes it again
        self.seconds = seconds


class InputGone(Gone):
    """An object that the call was given by reference is lost; the worker itself is well."""


class Leaving(RunError):
    """A worker has been told to end; its work is for others."""
