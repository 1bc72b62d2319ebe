"""``python -m genlight.adapter.cli``: the command line if its script is not on the path."""

from __future__ import annotations

import sys

from . import main

sys.exit(main())
