"""Trainers whose modules FSDP 2 shards over the ranks.

``shard`` shards what ``configure`` built; ``step`` is what each training step does then, ``tensors`` and
``state`` are about sharded tensors in a step and in ``state_dict``. What FSDP 2 cannot do stands in ``refused`` of the
folder above, with the way out. `FSDP2Strategy` has the settings.

May import ``ddp``, ``rank_check``, ``refused``, ``step_part`` and ``torch_internals`` of the folder above, discovery,
and what that may import.
"""
