"""Tensors that ranks hold parts of: `slices` for any tensor, `optimizer_placements` for the state of optimizers.

May import the format, the plumbing and the contract.
"""
