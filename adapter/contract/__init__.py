"""The vocabulary of trainer classes, jobs and the runtime: types, exceptions, run state, failures.

Imports nothing of genlight; every package may import it.
"""
