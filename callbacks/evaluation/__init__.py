"""Evaluation while training: by the trainer class, or by a command that scores checkpoints.

May import the rest of `callbacks`, and everything that `callbacks` may import.
"""
