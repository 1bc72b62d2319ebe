"""Watching the processes of a run on several ranks: who failed first, who lives, who never came.

May import what `genlight.adapter.run` may import.
"""
