"""The comparison of replicas across ranks, and the digests that it is made of.

May import the rest of `callbacks`, and what that may import.
"""
