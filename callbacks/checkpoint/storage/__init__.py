"""Whole or absent: the atomic commit and what belongs to checkpoints in a directory; files that are written and proven.

May import the format, the plumbing and the contract.
"""
