"""Where a scheduler placed this process, as a `JobContext`.

Reads the environment and never asks the scheduler. It may import the contract and plumbing; torch and Lightning are
loaded by `placement` alone.
"""
