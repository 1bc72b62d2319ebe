"""The parts of the benchmark ``step_overhead.py``: one idea a file."""
