"""Waits while it is imported, when only the rank of a run is known."""

import os

from fault_trainer import Faulty

trainer = Faulty()
trainer.rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or os.environ.get("LOCAL_RANK") or 0)
trainer.hold(60.0)
