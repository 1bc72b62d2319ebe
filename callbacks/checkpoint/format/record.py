"""The layout of a checkpoint on disk: the names of its parts, and the commit record.

A checkpoint `NAME` is a commit record ``NAME.json`` (or, when Lightning's ``ModelCheckpoint`` chose the path,
``NAME.ckpt``) and a folder ``NAME/`` with its data. If that name is taken, the folder is ``NAME~1/`` or the next free
one; the record names it. So an old checkpoint of the same name stays intact until the new one is complete, and
unrelated files are never touched.

If tensors are sharded, each rank has a folder ``NAME/rank-00001/`` with its slices, in files of the names below. The
files of those names in ``NAME/`` itself hold everything that is not sharded, and ``NAME/slices.json`` is the index of
all slices (see `slice_index`).

Frozen weights have a separate file, ``NAME/frozen.safetensors``. It is hard-linked between all checkpoints with the
same frozen weights.

A checkpoint exists if its record does. The record is one line of JSON whose last member is a digest of all bytes before
it, so that any change shows. It names every file of the checkpoint by its path relative to the record's own folder,
with size and digest: a folder that was moved still loads. Records of the older runtime (`gen_worker`) have no
digest and name no files.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash

from ....adapter.contract.exceptions import BrokenCheckpointError, UnstorableStateError
from ....adapter.plumbing.durable import TEMPORARY_PREFIX
from ....adapter.plumbing.safe_open import UnsafeFileError, read_beginning, read_regular
from ....adapter.plumbing.text import parse_json, with_unique_keys
from ....adapter.plumbing.urls import hide_urls

MODEL_FILE = "model.safetensors"
"""Tensors of ``LightningModule.state_dict()`` under its own keys."""
FROZEN_FILE = "frozen.safetensors"
"""Tensors of `MODEL_FILE` that training does not change, if several checkpoints share them."""
TENSORS_FILE = "training_state.safetensors"
"""All other tensors, and the bytes of NumPy arrays, under their paths in the state."""
STATE_FILE = "training_state.json"
"""Everything that is not a tensor, with references to the tensors."""
TRAINER_FOLDER = "trainer"
"""The files of the trainer's own ``save_checkpoint`` hook."""
SCORES_FILE = "scores.json"
"""Scores that came after the record was written; therefore the record does not list this file."""

FINAL_NAME = "final"
RECORD_SUFFIXES = (".json", ".ckpt")
_STEP_NAME = re.compile(r"step-(\d+)")
_NAME_OF_CALLBACK = re.compile(rf"step-\d{{8,}}|{FINAL_NAME}")
_TEMPORARY = re.compile(
    # A process id and a random number follow the name. After a name of the callback, the number has any length.
    rf"{re.escape(TEMPORARY_PREFIX)}(?:.+-\d+-[0-9a-f]{{8}}|(?:{_NAME_OF_CALLBACK.pattern})[^-]*-\d+-[0-9a-f]+)",
    re.DOTALL,
)


def step_name(step: int) -> str:
    """Return the name for a step: ``step-00000200`` for 200."""
    return f"step-{step:08d}"


def step_of_name(name: str) -> int | None:
    """Return the step in a checkpoint's name, or None."""
    match = _STEP_NAME.match(name)
    return int(match.group(1)) if match else None


def local_path(path: str | os.PathLike[str], argument: str = "dirpath") -> Path:
    """Return `path` as a path on a local file system.

    Raises:
        ValueError: It is a URL; the message names it as `argument`.
    """
    # Like fsspec, accept a ``file:`` scheme; Lightning turns ``file:///a`` into ``file:/a``.
    text = os.fspath(path)
    text = text.removeprefix("file:").removeprefix("//") if text.startswith("file:/") else text
    if "://" in text:
        raise ValueError(
            f"Invalid `{argument}`. Checkpoints must be on a local file system, because nothing else can be synced and "
            f"renamed atomically, but received {hide_urls(os.fspath(path))!r}. To save, name a local folder; for "
            "copies elsewhere, set `uploads.targets` of a job, or `targets` of UploadArtifacts. To load, copy the "
            "record and the folder of its name here first; a job does so for `inputs.resume_checkpoint_url`."
        )
    return Path(text)


def record_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of the record; `path` is the record, its folder, or the record without its suffix."""
    path = Path(os.path.abspath(path))
    return path if path.suffix in RECORD_SUFFIXES else path.parent / f"{path.name}.json"


def name_of(record: Path) -> str:
    """Return the checkpoint's name: the record's name without its suffix."""
    root, suffix = os.path.splitext(record.name)
    return root if suffix in RECORD_SUFFIXES else record.name


def is_record_of_callback(record: Path) -> bool:
    """Whether `record` has a name that only the `Checkpoint` callback gives."""
    root, suffix = os.path.splitext(record.name)
    return suffix == ".json" and _NAME_OF_CALLBACK.fullmatch(root) is not None


def is_temporary(name: str) -> bool:
    """Whether `name` is one of our temporary names, so that the file or folder is unfinished."""
    return name.startswith(TEMPORARY_PREFIX) and _TEMPORARY.fullmatch(name) is not None


def record_paths(directory: str | os.PathLike[str]) -> list[Path]:
    """Return all files in `directory` that are records by their names, sorted; empty if the directory does not exist.

    A file whose name does not come from the `Checkpoint` callback may be anything.
    """
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    paths = [Path(directory, name) for name in names if name.endswith(RECORD_SUFFIXES) and not is_temporary(name)]
    return [path for path in paths if os.path.isfile(path)]  # a link to itself, for example, is not a file


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    path: str
    """Relative to the record's folder, with slashes."""
    size: _Count
    """Bytes."""
    xxh3_128: _Digest
    """Hexadecimal digest of the content as it was in memory."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None
    """Hexadecimal digest, if the file was uploaded."""


@dataclass(frozen=True)
class LeftOut:
    """A tensor of the model that a checkpoint omits, because the trainer class builds it."""

    key: str
    dtype: str
    """The element type in a file."""
    shape: tuple[_Count, ...]
    xxh3_128: _Digest
    """Hexadecimal digest of its bytes in row-major order."""


@dataclass(frozen=True, kw_only=True)
class RecordMeta:
    """Facts of a run about a checkpoint, separate from its content."""

    step: _Count | None = None
    """Completed steps; None takes ``global_step`` from the checkpoint itself."""
    run_id: str = ""
    attempt: _Count = 1
    final: bool = False
    max_steps: _Count | None = None
    spec_digest: str | None = None
    spec: Mapping[str, Any] = field(default_factory=dict)
    """The fields that `spec_digest` covers, so that a mismatch can name those that differ."""
    trainer_checkpoint: Mapping[str, Any] | None = None
    """The result of the hook ``save_checkpoint``; a relative ``primary_path`` in it is within `trainer_folder`."""
    elapsed_s: Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)] = 0.0
    """Training time so far, over all attempts."""
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 1
    metrics: Mapping[str, _Finite | None] = field(default_factory=dict)
    """Monitored values at this step, for `keep_best`."""
    writer: str = ""
    """Name of the program that may remove the checkpoint by its rules; empty if none may."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Origin of the attempt: command, git, host, packages, tags, notes; empty if unknown."""
    parameters: frozenset[str] = frozenset()
    """Names of the model's tensors that are parameters; `finite_weights` checks only these. Not stored."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord(RecordMeta):
    """A parsed record. Its members must fit these annotations; others, of a later genlight, are ignored.

    `is_old` marks a record of an older runtime, whose files cannot be checked.
    """

    path: Path
    step: _Count
    run_id: str
    state: Any
    """The payload of the trainer class, as `encode` stores it; in a record with `is_old`, plain values."""
    created_at_ms: Annotated[int, msgspec.Meta(ge=-62_000_000_000_000, le=253_000_000_000_000)] = 0
    """Milliseconds since 1970, of the commit; limited to years 5 to 9987, to fit a date in any time zone."""
    folder: str | None
    """Name of the data folder next to the record."""
    files: tuple[FileEntry, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    is_old: bool = False
    left_out: tuple[LeftOut, ...] = ()
    """Tensors that the loading process must already have."""
    finite_weights: bool | None = None
    """Whether no parameter is nan or infinite; None if unknown, as for older checkpoints."""

    @property
    def name(self) -> str:
        """The checkpoint's name, such as ``step-00000200``."""
        return name_of(self.path)

    @property
    def data_path(self) -> Path | None:
        """The data folder."""
        return None if self.folder is None else self.path.parent / self.folder

    @property
    def trainer_folder(self) -> Path | None:
        """The ``output_dir`` of the trainer's hook, if it wrote anything.

        For an older runtime's record, that is the folder of the same name next to it, even if both were moved.
        """
        if self.is_old:
            folder = self.path.with_suffix("")
            return folder if folder.is_dir() else None
        return None if self.data_path is None else self.data_path / "trainer"

    @property
    def primary_path(self) -> Path | None:
        """The file or folder that the trainer's hook named for reporting and upload, as an absolute path.

        None if it named none, or one outside its folder: no record can make this process send other files.
        """
        named, folder = (self.trainer_checkpoint or {}).get("primary_path"), self.trainer_folder
        if folder is None or not isinstance(named, (str, os.PathLike)) or not is_path(os.fspath(named)):
            return None
        if self.is_old and os.path.isabs(named):  # absolute when it was written; the folder may have moved since
            named = f"{named}/".rpartition(f"/{folder.name}/")[2]
        path = Path(os.path.abspath(folder / named))
        return path if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)) else None

    @property
    def reported_path(self) -> Path:
        """The path that events and uploads name: the existing path that the trainer's hook named, or the record."""
        named = self.primary_path
        return named if named is not None and named.exists() else self.path

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together, without the record itself."""
        return sum(file.size for file in self.files)

    def file_name(self, file: FileEntry) -> str:
        """Return the path of `file` within the data folder, such as ``trainer/lora.safetensors``."""
        return file.path.removeprefix(f"{self.folder}/")

    def tensor_file(self, file: FileEntry) -> str:
        """Return the file name that references to the tensors in `file` use."""
        name = self.file_name(file)
        return MODEL_FILE if name == FROZEN_FILE else name


def is_path(text: str) -> bool:
    """Whether the operating system accepts `text` as a path at all."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return "\0" not in text


FORMAT = "genlight.checkpoint"
FORMAT_VERSION = 1
RECORD_MARKER = b'{"format":"genlight.checkpoint"'
"""Start of every record."""

LARGEST_RECORD_BYTES = 256 << 20
"""Limit on the size of a record, because JSON takes many times its size in memory. Tensors are not in the record."""

MOST_NAMES = 250_000
"""Limit on the files and on the omitted tensors that one record names, because each start reads it several times."""

_TORCH_MAGICS = (b"PK", b"\x80\x02")
"""First bytes of a file that ``torch.save`` wrote: a ZIP archive, or a bare pickle."""

_OLD_KEYS = frozenset({"step", "run_id", "request_id", "final", "trainer_checkpoint", "state"})
"""Keys that an older runtime's record may have."""
_DIGEST_MEMBER = b',"digest":"xxh3_128:'
_NOT_STORED = ("path", "is_old", "digest", "parameters")


def build_json(content: Any) -> bytes:
    """Return values of a checkpoint as JSON. A float that is not finite becomes null."""
    try:
        return msgspec.json.encode(content, enc_hook=dict)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape
        return json.dumps(content, separators=(",", ":"), allow_nan=False, default=_as_plain).encode()


def _as_plain(value: Any) -> Any:
    """Return the values of JSON that is already encoded, and a mapping or an entry of a record as a dictionary."""
    return json.loads(bytes(value)) if isinstance(value, msgspec.Raw) else msgspec.to_builtins(value, enc_hook=dict)


def digest_of(data: bytes | memoryview) -> str:
    """Return the xxh3-128 of `data`, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def serialise_record(record: CheckpointRecord) -> bytes:
    """Return the bytes of `record`, without its location.

    Raises:
        UnstorableStateError: They exceed the limit on a record.
    """
    names = [field.name for field in dataclasses.fields(record) if field.name not in _NOT_STORED]
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **{name: getattr(record, name) for name in names}}
    if _has_too_many_names(content):
        raise UnstorableStateError("save_checkpoint()", "a folder", f"write at most {MOST_NAMES:,} files, or pack them")
    content["metrics"] = {name: v if math.isfinite(v or 0) else None for name, v in record.metrics.items()}
    body = build_json(content)[:-1]
    if len(body) > LARGEST_RECORD_BYTES - 100:
        hint = f"it takes {len(body):,} bytes of JSON, and a record has room for {LARGEST_RECORD_BYTES:,}; use tensors"
        raise UnstorableStateError("state_dict()", type(json.loads(build_json(record.state))).__name__, hint)
    return body + _DIGEST_MEMBER + digest_of(body).encode() + b'"}\n'


def _has_too_many_names(content: Mapping[str, Any]) -> bool:
    lists = [content.get("files"), content.get("left_out")]
    return any(isinstance(names, list | tuple) and len(names) > MOST_NAMES for names in lists)


def read_record(path: str | os.PathLike[str], data: bytes | None = None) -> CheckpointRecord:
    """Parse the record at `path` and prove its own digest; its files are not checked.

    Args:
        path: The file.
        data: Its content, if there is no such file yet.

    Raises:
        BrokenCheckpointError: The record is damaged, or is not a record.
        FileNotFoundError: There is no such file.
    """
    # A link (``last.ckpt``) is read as its target, because the files of the checkpoint are next to the target.
    path = Path(os.path.realpath(path))
    try:
        return _parse_record(path, data)
    except UnsafeFileError as error:
        reason = f"its record {path.name} cannot be read: {error.strerror}"
    except ValueError as error:
        reason = str(error)
    raise BrokenCheckpointError(name_of(path), reason)


def _parse_record(path: Path, data: bytes | None) -> CheckpointRecord:
    """Return the record at `path`.

    Raises:
        ValueError: It is damaged or not a record; the message says which.
    """
    if data is None and is_torch_file(path):  # avoid reading gigabytes only to find that they are not JSON
        raise ValueError(f"{path.name} was written by torch.save and is not a record of genlight")
    data = read_regular(path, limit=LARGEST_RECORD_BYTES) if data is None else data
    try:
        # An older runtime has no digest, and writes NaN as Python does.
        content = parse_json(data) if _DIGEST_MEMBER in data else json.loads(data, object_pairs_hook=with_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its record {path.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"its record {path.name} is not a JSON object")  # noqa: TRY004 - the same type for every fault
    if content.keys() <= _OLD_KEYS and isinstance(content.get("state"), dict):
        return _old_record(path, content)
    body, member, tail = data.rpartition(_DIGEST_MEMBER)
    if not member:
        raise ValueError(f"{path.name} has no digest and is not an older runtime's record")
    if tail != digest_of(body).encode() + b'"}\n':
        raise ValueError(f"the digest of its record {path.name} does not match")
    return _new_record(path, content)


def is_torch_file(path: Path) -> bool:
    """Whether ``torch.save`` wrote the file at `path`.

    Raises:
        OSError: It cannot be read, or is not a regular file.
    """
    return read_beginning(path, 2) in _TORCH_MAGICS


@functools.cache
def library_versions() -> Mapping[str, str]:
    """Versions of Python and of the libraries that a checkpoint depends on."""
    versions = {"python": platform.python_version()}
    for name in ("genlight", "torch", "lightning", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _old_record(path: Path, content: dict[str, Any]) -> CheckpointRecord:
    """Return the record of an older runtime."""
    step = content.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63:
        step = step_of_name(name_of(path)) or 0
    trainer_checkpoint = content.get("trainer_checkpoint")
    return CheckpointRecord(
        path=path,
        step=step,
        run_id=str(content.get("run_id") or content.get("request_id") or ""),
        state=content["state"],
        final=content.get("final") is True,
        trainer_checkpoint=trainer_checkpoint if isinstance(trainer_checkpoint, dict) else None,
        folder=None,
        files=(),
        is_old=True,
    )


def _new_record(path: Path, content: dict[str, Any]) -> CheckpointRecord:
    """Return the record with this `content`; raises like `_parse_record`."""
    if content.get("format") != FORMAT:
        raise ValueError(f"{path.name} is not a checkpoint record")
    if (format_version := content.get("format_version")) != FORMAT_VERSION:
        raise ValueError(
            f"it has format version {format_version!r}, and this genlight reads versions up to {FORMAT_VERSION}; "
            "upgrade genlight"
        )
    if missing := {"step", "run_id"} - content.keys():  # msgspec would use the defaults of `RecordMeta`
        raise ValueError(f"its record {path.name} lacks {', '.join(sorted(missing))}")
    if _has_too_many_names(content):
        raise ValueError(f"its record {path.name} names more than {MOST_NAMES:,} files or tensors")
    try:
        record = msgspec.convert({**content, "path": path, "is_old": False, "parameters": ()}, CheckpointRecord)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise ValueError(f"its record {path.name} has a malformed member: {error}") from None
    # A foreign record must not make this process read, or delete, files outside its folder.
    # Compare strings: paths take ten times as long, and a record may name very many files.
    names = [entry.path for entry in record.files]
    for name in names if record.folder is None else [*names, record.folder]:
        if not {"", ".", ".."}.isdisjoint(name.split("/")) or not is_path(name):
            raise ValueError(f"its record names a file outside its folder, or indirectly: {name!r}")
    if "/" in (record.folder or ""):
        raise ValueError(f"its record names a folder inside another folder: {record.folder!r}")
    if len(set(names)) < len(names):
        raise ValueError("its record names a file twice")
    return record
