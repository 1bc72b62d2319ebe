"""The event log ``trainer_event.v1``: its events, the rules of an attempt, writer, locked file, reader, validation.

A run's origin (`run_metadata`) is noted there and in records. May import the plumbing and the contract.
"""
