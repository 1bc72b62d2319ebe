"""Views of runs, from what their folders contain: a listing, a page and a terminal view.

It only reads files, and imports neither torch nor Lightning. May import what `genlight.adapter.run` may, and that.
"""
