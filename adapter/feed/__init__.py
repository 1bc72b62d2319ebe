"""Arrow batches from files, tables and iterables: sharded over ranks, prefetched, with an exact position.

The public names are in `genlight.adapter`; importing this package imports neither torch nor Lightning nor pyarrow.
"""
