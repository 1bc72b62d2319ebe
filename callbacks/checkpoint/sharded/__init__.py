"""Tensors that ranks hold parts of.

May import the format, the plumbing and the contract.
"""
