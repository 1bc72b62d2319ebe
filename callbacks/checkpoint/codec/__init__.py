"""State as JSON and tensors, without pickle: trees of values, named types, tensors with their views and aliases.

May import the format, sharded tensors, the plumbing and the contract.
"""
