"""How a run does: heartbeats with throughput, floating point operations, power and memory.

May import the hooks, the reporters, the plumbing and the contract.
"""
