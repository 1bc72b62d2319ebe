"""Trainer classes as people write them, each compared with a plain loop in every mode."""
