"""Kill and restart every class of the zoo in one process; a witness must find no difference.

``python -m zoo.restarts FOLDER [CLASS …]``, in the folder of the tests, prints one JSON object: the number of restarts;
as ``alarms`` the results of those in which no step changed, but the witness said so or compared nothing; and as
``changed`` the results of those in which a step changed.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from support.resume_faults import restart

from .harness import zoo
from .worker import Shares

RESTARTS = ((2, 5), (2, 3), (3, 5), (4, 7), (3, 8))
"""Steps between checkpoints, and the last step before the kill."""


def main(folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    count, alarms, changed = 0, dict[str, Any](), dict[str, Any]()
    for name in names or zoo():
        cls: Any = zoo()[name]
        for every, killed_after in RESTARTS:
            steps = killed_after + 1
            shares = functools.partial(Shares, cls.rows, 0, 1, steps)
            data = shares if cls.loader is None else functools.partial(cls.loader, 0, 1)
            where = folder / f"{name}-{every}-{killed_after}"
            options: dict[str, Any] = {"killed_after": killed_after, "every_n_steps": every, "steps": steps}
            try:
                result = restart(where, cls, data, **options)
            except AssertionError as error:
                result = {"changed": str(error)}
            count += 1
            if any(result.values()):
                (alarms if result["changed"] is None else changed)[where.name] = result
    print(json.dumps({"restarts": count, "alarms": alarms, "changed": changed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
