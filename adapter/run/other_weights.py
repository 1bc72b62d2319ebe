"""A checkpoint whose weights are not those of the model that was built."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..contract.exceptions import CheckpointError

__all__ = ["about_other_weights"]

_MOST_NAMED = 6
_BEGINS = "Error(s) in loading state_dict for"
_SIZE = re.compile(
    r"size mismatch for (?P<name>\S+): .* torch\.Size\((?P<saved>\[[^\]]*\])\).* torch\.Size\((?P<built>\[[^\]]*\])\)"
)
_KEYS = re.compile(r"(?P<kind>Missing|Unexpected) key\(s\) in state_dict: (?P<names>.*)")
_WHERE = {"Missing": "is not in the checkpoint", "Unexpected": "is in the checkpoint alone"}


def about_other_weights(error: Exception) -> CheckpointError | None:
    """An error that names the tensors which differ and the way out; None where `error` is about something else.

    torch tells it in words alone, by a RuntimeError of ``load_state_dict``.
    """
    text = str(error)
    if not text.startswith(_BEGINS):
        return None
    found = list(_differences(text))
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return CheckpointError(
        f"The weights of the checkpoint are not those of the model that was built: {'; '.join(found[:_MOST_NAMED])}"
        f"{more}. Build the model as it was, or start at step 0 with `genlight run --fresh`, of a fit "
        "`--resume never`."
    )


def _differences(text: str) -> Iterator[str]:
    for line in text.splitlines():
        size, keys = _SIZE.search(line), _KEYS.search(line)
        if size is not None:
            yield f"{size['name']} is {size['saved']} in the checkpoint and {size['built']} here"
        elif keys is not None:
            for name in re.findall(r'"([^"]+)"', keys["names"]):
                yield f"{name} {_WHERE[keys['kind']]}"
