"""The base of all callbacks.

`hook` has the class `Hook` and its policy, `events` fires events and holds the run state that all callbacks share, and
`cadence` decides when a hook is due.

May import the reporters, the plumbing and the contract, and from other callbacks the types in the signatures of events.
"""
