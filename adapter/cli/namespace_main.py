"""``python -m genlight``. It is installed as ``genlight/__main__.py``, because ``genlight`` has no source folder."""

from __future__ import annotations

import sys

from genlight.adapter.cli import main

if __name__ == "__main__":
    sys.exit(main())
