"""Views of runs, from what their folders contain: a listing, a page and a terminal view.

Reads files alone, and imports neither torch nor Lightning. May import what `genlight.adapter.run` may, and that.
"""
