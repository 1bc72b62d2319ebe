"""Types of ``gen_worker.trainer``, which are those of genlight; see `genlight.adapter.compat`."""

from genlight.adapter import *
from genlight.adapter.module.old_names import *
