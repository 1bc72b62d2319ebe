"""The Lightning loop that steps a hosted trainer class, and what it asks of the module that hosts it.

May import gradients and what those may import; it never imports the module.
"""
