"""A class that compiles its module by inductor, to C++ on the host."""

import torch

from .small import Accumulating


class Compiled(Accumulating):
    """Two backward calls and clipping for each update of a compiled module."""

    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "model": torch.compile(state["model"])}
