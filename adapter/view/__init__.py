"""Runs as they are seen: what their folders say of them, in a listing, a page and a terminal.

Reads files alone, and imports neither torch nor Lightning. May import what `genlight.adapter.run` may, and that.
"""
