"""`HostedTrainer`, a trainer class with its state, and `ContractModule`, the LightningModule that hosts it.

`loop.py` and `epoch_loop.py` are its training loop. `state.py` saves and restores what ``configure`` built, and
`as_built.py` compares it with what is built now. `rollout.py` and `evaluation.py` run the hooks of these names.
`plugin_loading.py` loads a class. May import the feed, gradients, discovery, callbacks, plumbing and the contract.
"""
