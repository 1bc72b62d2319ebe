"""State as JSON and tensors, without pickle: trees of values, named types, tensors with their views and aliases.

`state_tree` converts values to JSON and back, `tensors` collects their tensors, and `references` checks the references
from the JSON to the tensors in the files.

May import the format, sharded tensors, the plumbing and the contract.
"""
