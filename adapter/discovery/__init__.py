"""Discovery of modules, optimizers, schedulers and bare parameters in a trainer's state or on the trainer itself.

May import the contract, the plumbing and the callbacks.
"""
