"""The parts of the benchmark ``step_overhead.py``, one idea per file."""
