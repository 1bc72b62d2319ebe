"""A job: its spec, the environment and ``--set`` become one frozen `RunConfig`, and that a Lightning configuration.

May import the plumbing and the contract, and no torch.
"""
