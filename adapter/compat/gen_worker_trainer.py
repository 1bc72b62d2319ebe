"""``gen_worker.trainer`` for a process that has not imported genlight; installed as ``gen_worker/trainer.py``.

That folder has no ``__init__``. So Python does not use this file if there is a real package ``gen_worker`` anywhere on
the path, or a real ``gen_worker/trainer/`` in the same folder.
"""

from __future__ import annotations

import sys

from genlight.adapter.compat import stand_in

sys.modules[__name__] = stand_in(__name__)
