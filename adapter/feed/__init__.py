"""Arrow batches from files, tables and iterables: sharded over ranks, prefetched, with an exact position.

``arrow_feed`` has the feed, ``options`` its settings. ``files`` finds files, and ``sources`` opens files and tables.
``row_plan`` divides rows among ranks and steps; ``position`` has the order of the rows and the position. ``batching``
makes batches in a thread, ``workers`` in processes, and ``collate`` turns them into tensors. ``user_data`` feeds what a
user's function returns, and ``data_module`` has Lightning's data modules. ``experience`` has the data of policies that
collect it themselves (reinforcement learning).

The public names are in `genlight.adapter`; importing this package imports neither torch nor Lightning nor pyarrow. The
package may import gradients, and everything that gradients may import.
"""
