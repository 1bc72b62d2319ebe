"""Arrow batches from files, tables and iterables: sharded over ranks, prefetched, with an exact position.

``arrow_feed`` has the feed, ``options`` its settings. ``files`` finds files, and ``sources`` opens files and tables.
``row_plan`` divides rows among ranks and steps; ``position`` has the order of the rows and the position. ``batching``
decodes rows ahead in a thread and cuts them into batches, ``workers`` does so in processes, and ``collate`` turns
batches into tensors. ``user_data`` feeds what a user's function returns, and ``data_module`` has Lightning's data
modules. ``experience`` has replay buffers and the minibatches of a rollout.

The public names are in `genlight.adapter`; importing this package imports neither torch nor Lightning nor pyarrow. The
package may import gradients, and everything that gradients may import.
"""
