"""Inputs of a run: what references mean, and how they get to this machine.

Importing this package imports neither torch nor an HTTP client.
"""
