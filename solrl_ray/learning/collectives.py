"""Ends the collectives of a learner rank when another rank of its group is lost.

With gloo, a collective fails when a connection is closed. An NCCL kernel may wait forever. So the controller, which
learns of every loss, makes the other ranks abort.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
import torch.distributed

from solrl_ray.errors import PeerGone, RunError
from solrl_ray.learning.engine import abort_process_group

ABORT_SECONDS = 30.0
"""Time limit for aborting the group's collectives, seconds."""


class Collectives:
    def __init__(self, rank: int, device: torch.device) -> None:
        """`device`: device of the group's collectives. Create this object before the rank joins its group."""
        self._rank, self._device = rank, device
        self._aborted = self._closed = False
        self._turn = threading.Lock()
        """Held while collectives are aborted or the rank leaves its group."""

    def abort(self) -> None:
        """End the collective in which this rank waits, and make all later ones fail.

        Call it from another thread. After `close` it does nothing.
        """
        with self._turn:
            if not self._closed:
                self._aborted = True
                abort_process_group(self._device)

    def check(self) -> None:
        """Raises PeerGone after `abort`, because the update cannot be completed."""
        if self._aborted:
            raise PeerGone(f"learning on rank {self._rank}", "another rank of its group is lost")

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager for a block with collectives.

        Raises PeerGone if another rank is lost meanwhile, even if the block succeeds: an aborted collective may return
        wrong numbers.
        """
        try:
            yield
        except Exception as error:
            self.check()
            if _is_cut_off(error):
                raise PeerGone(f"learning on rank {self._rank}", f"its connections are closed: {error}") from error
            raise
        self.check()

    def close(self) -> None:
        """Disable `abort`; call it before leaving the process group. Raises RunError if an abort takes too long."""
        if not self._turn.acquire(timeout=ABORT_SECONDS):
            raise RunError(f"aborting the collectives of learner rank {self._rank} took over {ABORT_SECONDS:g} s")
        self._closed = True
        self._turn.release()


def _is_cut_off(error: Exception) -> bool:
    """Whether an error of a collective means that another rank is gone, not that it is slow or never joined.

    gloo has no class for its errors, so their text decides.
    """
    text = str(error).lower()
    return "timed out" not in text and (isinstance(error, torch.distributed.DistError) or "gloo/transport" in text)
