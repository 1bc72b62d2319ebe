"""Views of runs, made from the files in their folders: a listing, a page and a terminal view.

This package only reads files, and imports neither torch nor Lightning. It may import `genlight.adapter.run`, and
everything that `run` may import.
"""
