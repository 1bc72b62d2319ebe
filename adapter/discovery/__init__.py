"""Finds the objects that a trainer class built, in its state and on the trainer itself.

`discover.py` finds modules, optimizers, schedulers, scalers and bare tensors; `children.py` says where it searches.
`rank_local.py` separates state that may differ by rank. `wrapped_optimizers.py` has optimizers that wrap others.

This package may import the contract, the plumbing and the callbacks.
"""
