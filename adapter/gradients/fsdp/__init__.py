"""Trainers whose modules FSDP 2 shards over the ranks.

``shard`` shards what ``configure`` built; ``step`` is what each training step does then, ``ranks`` compares what the
ranks do, ``tensors`` and ``state`` are about sharded tensors in a step and in ``state_dict``, and ``refused`` is the
table of what FSDP 2 cannot do, which names the way out. `FSDP2Strategy` has the settings.

May import ``ddp``, ``step_part`` and ``torch_internals`` of the folder above, discovery, and what that may import.
"""
