"""What to do about errors of torch that users meet and whose own words do not say it."""

from __future__ import annotations

import errno
import re

from ..plumbing.failures import causes_of
from ..plumbing.redaction import text_of

__all__ = ["way_out_of"]

_WAYS_OUT = (
    (
        re.compile(r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)"),
        (
            "A data worker has died. Often the memory was full: use fewer `workers`, or smaller batches. With "
            "`workers` 0 an error of `collate` or of a dataset shows itself in the training process."
        ),
    ),
    (
        re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE),
        (
            "Another process uses the port at which the ranks meet. Set MASTER_PORT to a free one, or end what is left "
            "of an earlier run."
        ),
    ),
)


def way_out_of(error: BaseException) -> str | None:
    """What to do about `error`, or what it was raised from; None where it tells that itself, or nobody knows.

    torch raises a bare RuntimeError for most of them, so that its words have to be looked at.
    """
    for part in causes_of(error):
        if isinstance(part, OSError) and part.errno == errno.EADDRINUSE:
            return _WAYS_OUT[1][1]
        if isinstance(part, RuntimeError):
            text = text_of(part)
            for pattern, way_out in _WAYS_OUT:
                if pattern.search(text):
                    return way_out
    return None
