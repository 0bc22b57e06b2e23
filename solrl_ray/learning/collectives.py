"""The collectives of one rank of the learner group, which end when another rank is lost.

A collective of gloo fails when a connection is closed. A kernel of NCCL may wait for ever, so the controller, which
knows of each loss, has the other ranks abort.
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
"""Limit of aborting the group's collectives."""


class Collectives:
    def __init__(self, rank: int, device: torch.device) -> None:
        """`device`: on which the group's collectives work. Make it before the rank joins its group."""
        self._rank, self._device = rank, device
        self._aborted = self._closed = False
        self._turn = threading.Lock()
        """Held while collectives are aborted, or the rank leaves its group."""

    def abort(self) -> None:
        """End the collective in which this rank waits, and let all later ones fail. Call it in another thread; after
        `close` it does nothing.
        """
        with self._turn:
            if not self._closed:
                self._aborted = True
                abort_process_group(self._device)

    def check(self) -> None:
        """Raises PeerGone after `abort`: the update cannot end."""
        if self._aborted:
            raise PeerGone(f"learning on rank {self._rank}", "another rank of its group is lost")

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A block with collectives. Raises PeerGone if another rank is lost meanwhile, whatever came of the block: an
        aborted collective may return numbers of no use.
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
        """Leave the group; call it before the process group is left. Raises RunError: an abort takes too long."""
        if not self._turn.acquire(timeout=ABORT_SECONDS):
            raise RunError(f"aborting the collectives of learner rank {self._rank} took over {ABORT_SECONDS:g} s")
        self._closed = True
        self._turn.release()


def _is_cut_off(error: Exception) -> bool:
    """Whether an error of a collective says that another rank is gone, not that it is slow or never came. gloo has no
    class for its errors.
    """
    text = str(error).lower()
    return "timed out" not in text and (isinstance(error, torch.distributed.DistError) or "gloo/transport" in text)
