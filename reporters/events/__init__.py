"""The event log ``trainer_event.v1``: its events, the rules of an attempt, writer, locked file, reader, validation;
where a run came from.

May import the plumbing and the contract.
"""
