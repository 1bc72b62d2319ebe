"""Tensors that ranks have parts of, read back by any number of ranks; and how the ranks speak about a save.

May import the storage, the format, the bytes of tensors of the codec, the plumbing and the contract.
"""
