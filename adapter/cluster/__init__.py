"""Where a scheduler placed this process: Slurm's variables become a `JobContext`; injection into functions that ask.

Reads the environment and never asks the scheduler. It may import the contract and plumbing; torch and Lightning are
loaded by `slurm_environment` alone.
"""
