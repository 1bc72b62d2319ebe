"""One attempt of a job: locks, inputs, resume, the Lightning training, its outcome and its one terminal event.

May import everything but the command line.
"""

from __future__ import annotations

from ..plumbing.operating_system import require_linux

require_linux(__name__)
