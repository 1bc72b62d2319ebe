"""One rank of a test: calls a function of the test's file and stores what it returns.

`on_ranks` of `support.rank_processes` starts it: ``on_rank.py RANK WORLD_SIZE FOLDER FILE FUNCTION ARGUMENTS…``.
"""

import importlib.util
import logging
import sys

import torch

from support.rank import Rank

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    rank = Rank.of_command_line()
    spec = importlib.util.spec_from_file_location("test_of_ranks", sys.argv[4])
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, sys.argv[5])(rank, *sys.argv[6:])
    torch.save(found, rank.folder / f"rank{rank.number}.pt")
