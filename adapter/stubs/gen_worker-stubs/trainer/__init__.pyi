"""Types of ``gen_worker.trainer``, which are those of genlight; see `genlight.adapter.compat`."""

from genlight.adapter import *
from genlight.adapter.compat.old_names import *
