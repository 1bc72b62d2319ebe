"""Contents of a checkpoint's files, without the values of tensors, and whether they can be restored in this process.

A digest proves that nothing has changed since a file was written, but not that its author meant well. So before a
checkpoint is chosen, its headers, indices and references are decoded and compared with the sizes of the files, without
reading a tensor. A checkpoint counts as broken, and is skipped, if a reference has no bytes, a type does not exist, or
a part has another form than Lightning expects. Loading such a checkpoint could crash, or allocate memory for bytes that
no file has. Values that a trainer class or a user's callback stores are not checked.

The module imports neither torch nor Lightning: a tensor is a `TypedShape` here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError, UnloadableCheckpointError
from ...adapter.plumbing.text import parse_json
from .codec.references import Stored, check_tensor
from .codec.state_tree import UnknownTypeError, check
from .format.headers import ELEMENT_BYTES, RAW, TORCH_TYPES, TypedShape, element_bytes, header_from
from .format.record import MODEL_FILE, STATE_FILE, CheckpointRecord, FileEntry
from .format.slice_index import SLICES_FILE, SlicedTensor, is_of_tensors, parse_slices
from .storage import open_file_of, read_proven


def read_header(record: CheckpointRecord, entry: FileEntry) -> dict[str, TypedShape]:
    """Return the tensors of a safetensors file of `record`, reading only its header.

    Raises:
        BrokenCheckpointError: The file is missing, or its header is malformed.
    """
    with open_file_of(record, entry) as file:
        return header_from(file.read, entry.size)


def sliced_tensors(record: CheckpointRecord) -> list[SlicedTensor]:
    """Return the tensors that several ranks saved in slices; the index is proven, the slices not yet.

    Raises:
        BrokenCheckpointError: The index is missing, changed or malformed, or names bytes that are in no file.
    """
    files = {record.file_name(entry): entry for entry in record.files}
    if SLICES_FILE not in files:
        return []
    sizes = {name: entry.size for name, entry in files.items()}
    return read_proven(record, files[SLICES_FILE], lambda data: parse_slices(data, sizes))


def _typed_shape(tensor: SlicedTensor) -> TypedShape:
    """Return the header's description of `tensor` as if one file held all of it."""
    nbytes = math.prod(tensor.shape) * (element_bytes(tensor.dtype) or 0)
    if tensor.dtype in TORCH_TYPES:
        return TypedShape(TORCH_TYPES[tensor.dtype], tensor.shape, (0, nbytes))
    return TypedShape(RAW, (nbytes,), (0, nbytes))


def read_contents(
    record: CheckpointRecord, read: Callable[[CheckpointRecord, FileEntry], dict[str, TypedShape]] = read_header
) -> tuple[dict[str, Any], Stored, list[SlicedTensor]]:
    """Return the content of the state file, the tensors in all files, and the tensors stored in slices.

    Args:
        record: The checkpoint's record.
        read: Reads a file of tensors and returns its header.

    Raises:
        BrokenCheckpointError: A file is missing or malformed, or two files have the same tensor.
    """
    stored: Stored = {}
    content: Any = None
    for entry in record.files:
        name = record.file_name(entry)
        if name == STATE_FILE:
            content = read_proven(record, entry, parse_json)
        elif is_of_tensors(name):
            for key, tensor in read(record, entry).items():
                place = record.tensor_file(entry), key
                if place in stored:
                    raise BrokenCheckpointError(record.name, f"it has {key!r} twice, the second in {entry.path}")
                stored[place] = tensor
    if not isinstance(content, dict) or not isinstance(content.get("checkpoint"), dict):
        raise BrokenCheckpointError(record.name, f"it has no {STATE_FILE} that is an object with a checkpoint in it")
    sliced = sliced_tensors(record)
    stored |= {(tensor.file, tensor.key): _typed_shape(tensor) for tensor in sliced}
    for left in record.left_out:
        if left.dtype not in TORCH_TYPES.values() or (MODEL_FILE, left.key) in stored:
            raise BrokenCheckpointError(record.name, f"its description of the omitted tensor {left.key!r} is malformed")
        size = math.prod(left.shape) * ELEMENT_BYTES[left.dtype]
        stored[MODEL_FILE, left.key] = TypedShape(left.dtype, left.shape, (0, size))
    return content, stored, sliced


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
    gradients: list[dict[str, Any]] = []
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
    own = msgspec.convert(checkpoint, _Parts).genlight
    for name, gradient in (each for gradients in own.gradients for each in gradients.items()):
        # `check` returns a plain `object()` in place of a sparse tensor or a tensor of a subclass.
        if not isinstance(gradient, TypedShape | None) and type(gradient) is not object:
            raise ValueError(f"the gradient of {name} is no tensor")
    for states in own.rng:
        forms = {(state.dtype, len(state.shape)) for state in (states.torch, *states.generators)}
        if states.python.words.shape != _PYTHON_WORDS or forms != {("U8", 1)}:
            raise ValueError("its random states do not have the form of Python's and torch's")


def check_contents(record: CheckpointRecord, *, knows_types: bool = False) -> None:
    """Prove that the parts of a checkpoint whose digests match fit together and can be restored in this process.

    Args:
        record: The checkpoint.
        knows_types: Whether the modules are imported whose types it may name. If not, a module that is imported later
            may still provide a missing type.

    Raises:
        BrokenCheckpointError: The parts do not fit, or a file cannot be read; the message names the file or the value.
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
