"""``python -m slurm.runner``, the command of older batch scripts; installed as ``slurm/runner.py``.

That folder has no ``__init__``: if a package `slurm` is installed, Python takes that one and never sees this file.
"""

from __future__ import annotations

import sys

from genlight.adapter.runner.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
