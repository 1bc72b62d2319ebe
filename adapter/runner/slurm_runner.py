"""``python -m slurm.runner``, the command of older batch scripts; installed as ``slurm/runner.py``.

That folder has no ``__init__``: if a package `slurm` is installed, Python takes that one and never sees this file.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("genlight.adapter.runner", run_name="__main__", alter_sys=True)
