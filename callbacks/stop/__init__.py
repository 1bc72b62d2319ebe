"""Stops: their sources, signals, the agreement of all ranks on one step, and data workers that outlive a signal.

May import the hook, the reporters, the plumbing and the contract.
"""
