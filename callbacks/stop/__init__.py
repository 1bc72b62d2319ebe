"""Stops: their sources, signals and launchers, how all ranks agree on one step, and data workers that outlive signals.

May import the hook, the reporters, the plumbing and the contract.
"""
