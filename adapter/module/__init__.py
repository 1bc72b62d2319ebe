"""`HostedTrainer`, a trainer class with its state, and `ContractModule`, the LightningModule that hosts it.

`loop.py` and `epoch_loop.py` are its training loop. `state.py` saves and restores the objects that ``configure`` built,
and `as_built.py` compares them with those that a resume builds. `rollout.py` has the batches that a class collects
itself. `plugin_loading.py` loads a class.

This package may import the feed, gradients, discovery, callbacks, cluster, plumbing and the contract.
"""
