"""The base of all callbacks: `hook` (the class `Hook` and its policy), `events` (fire events, share the run state) and
`cadence` (decide when a hook is due).

May import the reporters, the plumbing and the contract, and from other callbacks the types in the signatures of events.
"""
