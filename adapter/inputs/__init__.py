"""Inputs of a run: parse references and bring the files to this machine.

Importing this package imports neither torch nor an HTTP client.
"""
