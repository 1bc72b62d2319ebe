"""Checkpoints that all ranks write: each its own slices, read back by any number of ranks.

May import the storage, the codec, the format, the plumbing and the contract.
"""
