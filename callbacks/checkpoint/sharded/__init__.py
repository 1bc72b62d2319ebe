"""Tensors that ranks have parts of, and how the ranks speak about a save.

May import the plumbing and the contract, and `Box` of the contents.
"""
