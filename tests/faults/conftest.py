"""Fixtures of tests with faults.

`GENLIGHT_LONG_FAULTS=1` selects the long versions, as ``make faults`` does.
"""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from support.faulty_disk import crash_after, crash_before, crash_torn


@pytest.fixture(scope="session")
def is_long():
    return os.environ.get("GENLIGHT_LONG_FAULTS") == "1"


CRASHES = {"before": crash_before, "after": crash_after, "torn": crash_torn}
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EACCES": errno.EACCES}


@pytest.fixture(params=sorted(CRASHES))
def crash(request):
    return CRASHES[request.param]


@pytest.fixture(params=sorted(ERRORS))
def error_code(request):
    return ERRORS[request.param]


@pytest.fixture
def memory(tmp_path):
    """A folder on a file system in memory, on which a sync costs nothing."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)
