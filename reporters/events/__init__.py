"""The event log ``trainer_event.v1``: events, rules of an attempt, writer, locked file, reader and validation.

`run_metadata` describes the origin of a run, for event logs and checkpoint records. May import the plumbing and the
contract.
"""
