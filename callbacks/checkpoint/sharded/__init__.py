"""Tensors that ranks hold parts of, and the messages between ranks about a save.

May import the format, the plumbing and the contract.
"""
