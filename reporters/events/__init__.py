"""The event log ``trainer_event.v1``: lines, the locked file, the rules of an attempt, reader, schema, validation.

May import the plumbing and the contract.
"""
