"""The base of all callbacks here: failure, rank and order policy, cadences, events and the clock.

May import the reporters, the plumbing and the contract.
"""
