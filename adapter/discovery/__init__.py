"""Finds modules, optimizers, schedulers and bare parameters in a trainer's state or on the trainer itself.

This package may import the contract, the plumbing and the callbacks.
"""
