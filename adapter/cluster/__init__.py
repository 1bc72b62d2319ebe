"""The place of this process in a scheduler's job, as a `JobContext`.

Reads the environment and never asks the scheduler. It may import the contract and plumbing; only `placement` loads
torch and Lightning.
"""
