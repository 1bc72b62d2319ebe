"""The vocabulary of trainer classes, jobs and the runtime.

`types.py` has the types, the protocols and the run state; `exceptions.py` has the exceptions and the categories of
failures. Imports nothing of genlight; every package may import it.
"""
