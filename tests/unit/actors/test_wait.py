"""What a failure of Ray's becomes: one of our errors, in one sentence."""

from __future__ import annotations

import errno
import pickle
import re

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, OutOfMemoryError, RayTaskError

from actors.cluster import wait
from solrl_ray.errors import RewardError, RunError, Unreachable, UserError, WorkerGone


def failed(cause: Exception) -> RayTaskError:
    """As Ray raises it: also an instance of the cause's class."""
    error = RayTaskError("explore", "Traceback", cause, proctitle="ray::Explorer", pid=1, ip="192.0.2.1")
    return error.as_instanceof_cause()


@pytest.mark.parametrize("ours", [UserError("no such file"), RunError("disagree"), RewardError("not finite")])
def test_our_own_errors_pass_through(ours: Exception) -> None:
    assert wait.translated(failed(ours), "start on explorer-0") is ours


def test_a_foreign_error_is_named() -> None:
    error = wait.translated(failed(KeyError("width")), "start on explorer-0")
    assert type(error) is RunError
    assert str(error) == "start on explorer-0 failed: KeyError: 'width'"


def test_an_error_whose_first_line_introduces_others_keeps_them() -> None:
    error = RuntimeError(
        "Version mismatch: The cluster was started with:\n  Ray: 2.59.0\nThis process with:\n  Ray: 2.60.0"
    )
    assert wait.first_line(error) == (
        "Version mismatch: The cluster was started with: Ray: 2.59.0 This process with: Ray: 2.60.0"
    )
    assert wait.first_line(OSError("out of memory\nSee the manual")) == "out of memory"


def test_a_full_disk_is_told_with_what_to_do() -> None:
    error = wait.translated(failed(OSError(errno.ENOSPC, "No space left on device")), "the run")
    assert str(error) == "the run found no space left on a disk; free some space and continue with --resume"
    error = wait.translated(
        failed(OSError(errno.ENOSPC, "No space left on device", "/runs/a/metrics.jsonl")), "the run"
    )
    assert "the disk of /runs/a/metrics.jsonl; free some space" in str(error)


def test_a_lost_argument_is_not_the_fault_of_the_call() -> None:
    error = wait.translated(failed(ObjectLostError("ab12", None, "")), "store")
    assert isinstance(error, wait.InputGone)
    assert str(error).startswith("store failed: an object it needs is lost: All copies of ab12 have been lost")


def test_the_reason_of_a_death_is_found_behind_the_ids() -> None:
    died = ActorDiedError()
    died.error_msg = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Explorer\n\tpid: 5\n"
        "\x1b[36mThe actor is dead\x1b[39m because its worker process has died."
    )
    assert wait.first_line(died) == "The actor is dead because its worker process has died."


def test_a_cut_network_is_told_from_a_death_and_without_ids() -> None:
    cut = ActorUnavailableError("The actor is temporarily unavailable: RpcError: timed out", b"\x5a" * 16)
    silent = ActorDiedError()
    silent.error_msg = (
        f"The actor died unexpectedly before finishing this task.\n\tactor_id: {'5a' * 16}\n"
        f"The actor died because its node has died. Node Id: {'b3' * 28}\n"
        "\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"
    )
    killed = ActorDiedError()
    killed.error_msg = f"The actor is dead because its worker {'5a' * 16} was killed."
    found = [wait._gone(error, "a unit") for error in (cut, silent, killed)]
    assert [type(error) for error in found] == [Unreachable, Unreachable, WorkerGone]
    assert not any(re.search("[0-9a-f]{16}", str(error)) for error in found)
    assert "The actor is unavailable: The actor is temporarily unavailable" in str(found[0])
    assert "The actor is dead because its worker was killed." in str(found[2])


def test_a_reason_stays_one_line_of_bounded_length() -> None:
    reason = wait.first_line(OutOfMemoryError("word " * 1000))
    assert len(reason) <= 400
    assert reason.endswith("word …")


def test_losses_keep_their_words_between_processes() -> None:
    error = pickle.loads(pickle.dumps(wait.WorkerGone("the update", "no answer")))
    assert isinstance(error, wait.WorkerGone)
    assert str(error) == "the update failed: no answer"
