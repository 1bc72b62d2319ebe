"""Tensors that ranks hold parts of, and the messages between ranks about a save.

May import the plumbing and the contract, and `Box` of the contents.
"""
