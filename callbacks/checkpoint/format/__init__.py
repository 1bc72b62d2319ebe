"""The format on disk: names, the commit record, headers, indices and references.

May import the plumbing and the contract.
"""
