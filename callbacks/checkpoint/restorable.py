"""Check before a checkpoint is chosen whether a load could restore its contents in this process.

Digests prove that nothing has changed since a file was written, not that its author meant well. A reference without
bytes, a type that does not exist or a part in another form than Lightning expects would end the run at the load, with
an error that names no checkpoint. So the check finds them before a run depends on the checkpoint, without reading a
tensor. Values that a trainer class or a user's callback stores are not checked.

The module imports neither torch nor Lightning: a tensor is a `TypedShape` here.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import msgspec

from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError, UnloadableCheckpointError
from .codec.references import check_tensor
from .codec.state_tree import UnknownTypeError, check
from .contents import read_contents
from .format.headers import TypedShape
from .format.record import CheckpointRecord

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
_Version = Annotated[str, msgspec.Meta(pattern=r"^\d+(\.\d+)*([._-]?(a|b|rc|dev|post)[._-]?\d*)*(\+[A-Za-z0-9._-]+)?$")]
_PYTHON_WORDS = (625,)


class _PythonState(msgspec.Struct):
    """Result of ``random.getstate()``."""

    version: Literal[3]
    words: TypedShape
    gauss: float | None


class _RandomStates(msgspec.Struct):
    """The random states of one rank."""

    python: _PythonState
    torch: TypedShape
    numpy: dict[str, Any]
    devices: dict[str, Any]
    generators: list[TypedShape]


class _OwnPart(msgspec.Struct):
    """Part that the `Checkpoint` callback adds."""

    elapsed_s: _Seconds = 0.0
    rng: list[_RandomStates] = []
    gradients: list[dict[str, TypedShape | None]] = []
    sharded_gradients: dict[str, TypedShape] = {}


class _Parts(msgspec.Struct):
    """Lightning's dump."""

    epoch: int = 0
    global_step: int = 0
    version: _Version = msgspec.field(default="0", name="pytorch-lightning_version")
    state_dict: dict[str, Any] = {}
    loops: dict[str, dict[str, Any]] = {}
    callbacks: dict[str, Any] = {}
    optimizer_states: list[dict[str, Any]] = []
    lr_schedulers: list[dict[str, Any]] = []
    genlight_run_state: dict[str, Any] = {}
    genlight: _OwnPart = msgspec.field(default_factory=_OwnPart)


def _check_parts(checkpoint: Any) -> None:
    """Compare a decoded checkpoint with the form that a load can restore.

    Raises:
        ValueError: A part has another type; the message names its path.
    """
    for of_rank in msgspec.convert(checkpoint, _Parts).genlight.rng:
        of_torch = {(state.dtype, len(state.shape)) for state in (of_rank.torch, *of_rank.generators)}
        if of_rank.python.words.shape != _PYTHON_WORDS or of_torch != {("U8", 1)}:
            raise ValueError("its random states do not have the form of Python's and torch's")


def check_contents(record: CheckpointRecord, *, knows_types: bool = False) -> None:
    """Prove that the parts of a checkpoint whose digests match fit together and can be restored in this process.

    Args:
        record: The checkpoint.
        knows_types: Whether the modules are imported whose types it may name. If not, a module that is imported later
            may still provide a missing type.

    Raises:
        BrokenCheckpointError: They do not, or a file cannot be read; the message names the file or the value.
    """
    if record.is_old:
        return
    content, stored, _ = read_contents(record)
    for where, tree in (
        ("checkpoint", content["checkpoint"]),
        ("weights_metadata", content.get("weights_metadata")),
        ("state", record.state),
    ):
        try:
            decoded = check(tree, lambda reference: check_tensor(reference, stored), knows_types=knows_types)
            if where == "checkpoint":
                _check_parts(decoded)
            elif where == "weights_metadata" and not isinstance(decoded, dict | None):
                raise ValueError("it is not a dictionary")
        except (BrokenCheckpointError, OSError, MemoryError):
            raise
        except UnknownTypeError as error:
            raise UnloadableCheckpointError(record.name, error.problem) from error
        except CheckpointError as error:
            raise BrokenCheckpointError(record.name, str(error)) from error
        except Exception as error:
            raise BrokenCheckpointError(record.name, f"its {where} is malformed: {error!r:.500}") from error
