"""The command line: commands, and checks before a run. A user error is printed as one sentence, with an exit status.

Exit status: 0 done; 1 the run failed; 2 bad input; 130 interrupted; 141 the reader of the output closed it.
"""

from __future__ import annotations

import argparse
import errno
import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from solrl_ray.cli.options import parser
from solrl_ray.common import output, system_package
from solrl_ray.config import named
from solrl_ray.errors import RunError, UserError

RUN_FAILED, BAD_INPUT, INTERRUPTED, UNREAD = 1, 2, 130, 141

_REFUSALS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EIO,
    errno.EFBIG,
    errno.ENXIO,
}
"""Errors of disks, permissions and paths, which are printed as one sentence without a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. User errors are printed as one sentence."""
    # Otherwise every import of transformers lists missing optional packages.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Under `uv run`, Ray would build a new environment without this package for its workers. Ray reads this at import.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    arguments = argparse.Namespace()
    try:
        output.settle()
        _check_home()
        _check_certificates()
        system_package.settle()
        parser().parse_args(argv, arguments)
        arguments.as_typed = getattr(arguments, "config", None)  # in the typed order; resolving sorts names by kind
        for option in ("config", "rewards"):
            if given := getattr(arguments, option, None):
                setattr(arguments, option, named.resolve(given, several=option == "rewards"))
        status = int(arguments.run_verb(arguments))
        sys.stdout.flush()  # here, where its errors are caught
        return status
    except UserError as error:
        return _failed(error, BAD_INPUT)
    except RunError as error:
        return _failed(error, RUN_FAILED)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _unread():
            return UNREAD
        if not _refused(error, arguments):
            raise
        where = error.filename2 or error.filename
        if not where:  # the output may have failed; do not let Python flush the rest of it at exit
            output.drop()
        return _failed(RunError(f"{f'{where}: ' if where else ''}{error.strerror}"), RUN_FAILED)
    except KeyboardInterrupt as interrupt:
        with suppress(OSError):  # the terminal may be gone
            print(f"\n{interrupt or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED


def _check_home() -> None:
    """Raise UserError if this user has no home folder: Ray keeps its token in it, libraries their caches."""
    try:
        Path.home()
    except RuntimeError:
        raise UserError("HOME is not set and this user has no home folder; set HOME to a folder.") from None


def _check_certificates() -> None:
    """Raise UserError for a missing certificate file: library errors do not name it."""
    if (file := os.environ.get("SSL_CERT_FILE")) and not os.path.isfile(file):
        raise UserError(
            f"SSL_CERT_FILE is {file!r}, but that file does not exist; set it to a certificate file, or unset it."
        )


def _unread() -> bool:
    """Whether the reader closed the output, as in ``solrl list | head``. If so, the unwritten rest is dropped.

    Polls the pipe, because with PYTHONUNBUFFERED nothing is left to flush.
    """
    try:
        file = sys.stdout.fileno()
    except OSError:  # not a file, so it has no reader that could close it
        return False
    poll = select.poll()
    poll.register(file, 0)
    closed = any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    if closed:
        output.drop()
    return closed


def _refused(error: OSError, arguments: argparse.Namespace) -> bool:
    """Whether the error is the user's to fix; any other error is a bug and needs its traceback.

    A missing file is a user error only if a command-line argument named it.
    """
    if error.errno != errno.ENOENT:
        return error.errno in _REFUSALS
    values = [value if isinstance(value, list) else [value] for value in vars(arguments).values()]
    return str(error.filename) in {str(path) for paths in values for path in paths}


def _failed(error: Exception, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status
