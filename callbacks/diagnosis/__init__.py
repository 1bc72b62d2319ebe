"""Diagnosis: what a check reads, the rules that judge it, and the callback that tells when faults begin and end.

May import the hooks, the telemetry callbacks, the reporters, the plumbing and the contract.
"""
