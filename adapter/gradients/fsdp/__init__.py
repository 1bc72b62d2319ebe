"""Trains classes whose modules FSDP 2 shards over the ranks.

``shard`` shards the objects that ``configure`` built, and adapts their state dicts. ``step`` handles them in each
training step, and ``tensors`` handles the operations on sharded tensors in it. ``refused`` of the folder above lists
the limits of FSDP 2, with the ways out. `FSDP2Strategy` has the settings.

This package may import ``ddp``, ``rank_agreement``, ``refused``, ``step_part`` and ``torch_internals`` of the folder
above, discovery, and everything that discovery may import.
"""
