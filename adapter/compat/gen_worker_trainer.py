"""``gen_worker.trainer`` for a process that has not imported genlight; installed as ``gen_worker/trainer.py``.

That folder has no ``__init__``: a real package ``gen_worker`` wins wherever it lies on the path, and so does a real
``gen_worker/trainer/`` in this folder. Python never sees this file then.
"""

from __future__ import annotations

import sys

from genlight.adapter.compat import stand_in

sys.modules[__name__] = stand_in(__name__)
