"""A process that cannot start a thread: the stack of one would take more memory than addresses reach.

As a program it is the command line in such a process.
"""

import contextlib
import sys
import threading

NO_ROOM_BYTES = 1 << 46
"""Half of the address space of a process; other things need the rest."""


@contextlib.contextmanager
def no_thread_starts():
    """No thread starts within the block."""
    before = threading.stack_size(NO_ROOM_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


if __name__ == "__main__":
    threading.stack_size(NO_ROOM_BYTES)
    from genlight.adapter.cli import main

    sys.exit(main())
