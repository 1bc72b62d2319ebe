"""Trainers whose modules FSDP 2 shards over the ranks.

``sharding`` shards what ``configure`` built, by ``layout``; ``step`` is what each training step does then. Below it,
``units`` decide when weights are gathered, ``gradients`` reduces what only some ranks computed, ``hooks``, ``values``
and ``writes`` make sharded parameters behave as whole ones, ``rank_agreement`` and ``errors`` say what went wrong.

May import ``ddp``, ``step_part`` and ``torch_internals`` of the folder above, discovery, and what that may
import.
"""
