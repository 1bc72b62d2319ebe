"""The vocabulary of trainer classes, jobs and the runtime: types, exceptions, run state, failures.

The vocabulary: it imports nothing of genlight, and everybody may import it.
"""
