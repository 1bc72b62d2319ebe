"""The event log ``trainer_event.v1``.

- `event`: the events, and their JSON Schema
- `json_lines`: files of JSON lines, with a lock for the process that writes
- `event_log`: the writer; `event_logger`: the same as a Lightning logger
- `reader`: events and metrics of a log; `goodput`: how a run spent its time, computed from them
- `validation`: which event may follow which
- `run_metadata`: the origin of a run, for event logs and checkpoint records

May import the plumbing and the contract.
"""
