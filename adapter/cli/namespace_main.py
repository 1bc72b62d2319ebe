"""``python -m genlight``; installed as ``genlight/__main__.py``, since the namespace package has no files."""

from __future__ import annotations

import sys

from genlight.adapter.cli import main

if __name__ == "__main__":
    sys.exit(main())
