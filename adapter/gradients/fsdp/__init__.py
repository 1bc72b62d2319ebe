"""Trains classes whose modules FSDP 2 shards over the ranks.

``shard`` shards the objects that ``configure`` built, ``step`` handles them in each training step, ``tensors`` and
``state`` handle sharded tensors in a step and in ``state_dict``. ``refused`` of the folder above lists the limits of
FSDP 2, with the ways out. `FSDP2Strategy` has the settings.

This package may import ``ddp``, ``rank_agreement``, ``refused``, ``step_part`` and ``torch_internals`` of the folder
above, discovery, and everything that discovery may import.
"""
