"""The event log ``trainer_event.v1``: its events, the rules of an attempt, writer, locked file, reader, validation.

May import the plumbing and the contract.
"""
