"""``python tests/support/without_locks.py ERROR PROGRAM…``: run a program on a kernel whose disks have no file locks.

The kernel answers `flock` with this error, such as ENOLCK, in the process and its children (seccomp). The status 77
says that the kernel takes no such filter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

FLOCK = {"x86_64": 73, "aarch64": 32}
UNTAKEN = 77
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000


def main() -> None:
    code, *program = sys.argv[1:]
    steps = (
        (LOAD, 0, 0, 0),  # the number of the system call
        (JUMP_IF_EQUAL, 0, 1, FLOCK.get(platform.machine(), -1) & 0xFFFFFFFF),
        (RETURN, 0, 0, REFUSE | getattr(errno, code)),
        (RETURN, 0, 0, ALLOW),
    )
    filters = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    rules = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(filters)))
    libc = ctypes.CDLL(None)
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(SECCOMP, FILTER, rules):
        sys.exit(UNTAKEN)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
