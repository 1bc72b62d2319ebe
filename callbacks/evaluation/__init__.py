"""Evaluation while training: the trainer's own, that of a loader and a function, and that of a command.

May import the rest of `callbacks`, and what that may import.
"""
