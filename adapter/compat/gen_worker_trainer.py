"""Makes ``import gen_worker.trainer`` work before anything has imported genlight.

Installed as ``gen_worker/trainer.py``. After an import of genlight, the finder of `genlight.adapter.compat` answers.

The folder ``gen_worker`` has no ``__init__``. So Python does not use this file if there is a real package
``gen_worker`` anywhere on the path, or a real ``gen_worker/trainer/`` in the same folder.
"""

from __future__ import annotations

import sys

from genlight.adapter.compat import stand_in

sys.modules[__name__] = stand_in(__name__)
