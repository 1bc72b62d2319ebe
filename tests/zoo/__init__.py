"""Trainer classes as people write them; tests compare each with a plain loop in every mode."""
