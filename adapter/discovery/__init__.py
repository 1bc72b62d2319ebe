"""What a trainer class built: the modules, optimizers, schedulers and bare parameters in its state or on itself.

May import the contract, the plumbing and the callbacks.
"""
