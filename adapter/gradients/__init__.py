"""Routes a trainer's ``backward()`` and ``step()`` calls through averaging over ranks, FSDP 2, precision and hooks.

``step`` has the router and the ordered list of a step's parts; ``step_part`` is the interface of a part. The parts are
in ``update_guard``, ``fp16``, ``ddp`` and ``fsdp``. ``precision`` applies Lightning's precision plugins. ``rank_check``
and ``rank_agreement`` find ranks that diverged, ``lost_ranks`` finds ranks that were lost, and ``refused`` has the
messages for classes that cannot be trained. ``torch_hooks`` replaces names of torch during a training;
``torch_internals`` looks up its protected names.

This package may import discovery, and everything that discovery may import.
"""
