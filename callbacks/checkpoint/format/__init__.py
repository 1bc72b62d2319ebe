"""What lies on disk: names, the commit record, headers and digests, and how a checkpoint is proven whole.

May import the plumbing and the contract.
"""
