"""``python -m genlight``; installed as ``genlight/__main__.py``, since the namespace itself has no files of its own."""

from __future__ import annotations

import sys

from genlight.adapter.cli import main

if __name__ == "__main__":
    sys.exit(main())
