"""`HostedTrainer`, a trainer class with its state, and `ContractModule`, the LightningModule that hosts it.

They are in `hosted_trainer.py` and `module.py`; `loop.py` and `epoch_loop.py` are the training loop. `state.py` saves
and restores the objects that ``configure`` built, with `found_state.py` for state that the class does not return and
`trainer_files.py` for files that it writes; `as_built.py` compares the objects with those that a resume builds.
`rollout.py` has the batches that a class collects itself, `step_metrics.py` the metrics of a step. `plugin_loading.py`
loads a class, and `supported.py` refuses what cannot train one.

This package may import the feed, gradients, discovery, callbacks, cluster, plumbing and the contract.
"""
