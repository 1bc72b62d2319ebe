"""Comparison of replicas across ranks, by digests.

May import the rest of `callbacks` and everything below it.
"""
