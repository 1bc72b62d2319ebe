"""Checkpoints with valid digests and malformed contents are named and skipped, and the one before is used."""

import contextlib
import json
import os
import shutil

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from genlight.adapter.contract.exceptions import (
    BrokenCheckpointError,
    CheckpointError,
    UnstorableStateError,
)
from genlight.adapter.run.start import decide_start
from genlight.callbacks.checkpoint import RecordMeta, delete_checkpoint, load, newest_valid, save, verify
from genlight.callbacks.checkpoint.codec.state_tree import MAX_DEPTH
from genlight.callbacks.checkpoint.format import record as record_module
from genlight.callbacks.checkpoint.format.headers import parse_header
from genlight.callbacks.checkpoint.format.record import digest_of, read_record
from genlight.callbacks.checkpoint.format.slice_index import parse_slices
from genlight.callbacks.checkpoint.selection import find_final
from genlight.callbacks.checkpoint.storage import _hash_descriptor, hash_file
from support.messages import refusal

STATE = {
    "weights": torch.arange(6.0).reshape(2, 3),
    "array": np.arange(4),
    "tuple": (1, 2),
    "sparse": torch.eye(3).to_sparse(),
}
NAME = "step-00000002"


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A folder with two checkpoints, the newer of which is what an attack changes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        content = {"global_step": step, "state_dict": {"w": torch.ones(2, 2)}, "genlight": {"state": STATE}}
        save(folder / f"step-{step:08d}", content, meta=RecordMeta(run_id="r"))
    return folder


@pytest.fixture
def checkpoints(template, tmp_path):
    shutil.copytree(template, tmp_path / "c")
    return tmp_path / "c"


def _sign(folder, content):
    """Write a record with any content and a valid digest, as somebody who knows the format can."""
    content = {name: value for name, value in content.items() if name != "digest"}
    body = json.dumps(content, separators=(",", ":"))[:-1].encode()
    (folder / f"{NAME}.json").write_bytes(body + b',"digest":"xxh3_128:' + digest_of(body).encode() + b'"}\n')


def _content(folder):
    return json.loads((folder / f"{NAME}.json").read_bytes())


def _replace(folder, name, data):
    """Replace a file of the checkpoint, and its size and digest in the record."""
    path = folder / NAME / name
    path.write_bytes(data)
    size, digest = hash_file(path)
    content = _content(folder)
    for entry in content["files"]:
        if entry["path"] == f"{NAME}/{name}":
            entry |= {"size": size, "xxh3_128": digest}
    _sign(folder, content)


def _passed_over(folder):
    """Check that the older checkpoint is chosen; return the warning about the newer one."""
    record, warnings = newest_valid(folder)
    assert record is not None
    assert record.step == 1, "the attack was not noticed"
    (warning,) = warnings
    assert NAME in warning
    with contextlib.suppress(CheckpointError):  # a load raises nothing else
        load(folder / NAME)
    return warning


# records
WRONG = {
    "step": ["7", -5, 10**30, 2.5, None, True, [], {}],
    "run_id": [7, None, []],
    "attempt": ["1", -1, 10**30],
    "final": ["yes", 1, None],
    "max_steps": ["9", -1, 10**30],
    "spec_digest": [7, []],
    "spec": [None, [], "x"],
    "created_at_ms": ["x", 10**30, -(10**18), 10**17],
    "elapsed_s": ["x", -1, None, float("inf"), float("nan")],
    "world_size": [0, -1, "2", 10**30],
    "metrics": [[], {"a": "x"}, None, {"a": float("-inf")}],
    "versions": [[], {"a": 1}, None],
    "trainer_checkpoint": [[], "x", 7],
    "folder": [7, "../x", "/etc", "", ".", "a/b", "a\0b", "\ud800"],
    "files": [
        None,
        {},
        [None],
        [{}],
        [[]],
        *(
            [{"path": path, "size": 1, "xxh3_128": "0" * 32}]
            for path in (7, None, "../../etc/passwd", "/etc/passwd", "", "a\0b", "\ud800", "x" * 5000)
        ),
        *([{"path": "x", "size": size, "xxh3_128": "0" * 32}] for size in (-1, "1", None, 2.5, 10**30)),
        *([{"path": "x", "size": 1, "xxh3_128": digest}] for digest in (7, None, "", "G" * 32)),
        [{"path": "x", "size": 1, "xxh3_128": "0" * 32, "sha256": "short"}],
        [{"path": path, "size": 1, "xxh3_128": "0" * 32} for path in ("x", "./x")],
    ],
    "format_version": [None, "1", [], 99],
    "state": [{"$int": "x" * 10}, {"$timedelta": [10**30, 0, 0]}, {"$tensor": {"file": "x", "key": "y"}}],
}


@pytest.mark.parametrize(
    ("member", "value"), [(member, value) for member, values in WRONG.items() for value in values], ids=repr
)
def test_a_member_of_the_wrong_type_or_size_is_a_broken_checkpoint(checkpoints, member, value):
    _sign(checkpoints, _content(checkpoints) | {member: value})
    _passed_over(checkpoints)


@pytest.mark.parametrize("member", ["step", "run_id", "state", "folder", "files"])
def test_a_missing_member_is_a_broken_checkpoint(checkpoints, member):
    _sign(checkpoints, {name: value for name, value in _content(checkpoints).items() if name != member})
    _passed_over(checkpoints)


RECORDS = {
    "empty": b"",
    "not text": b"\xff\xfe",
    "list": b"[]",
    "number": b"7",
    "cut off": b"{",
    "no state": b'{"step":1}',
    "another format": b'{"state":{},"step":1,"format":"x"}',
    "deep objects": b'{"a":' * 100_000,
    "deep lists": b"[" * 1_000_000,
    "2M digits": b'{"step":' + b"9" * 2_000_000 + b"}",
}


@pytest.mark.parametrize("data", RECORDS.values(), ids=RECORDS)
def test_a_file_that_is_not_a_record_is_a_broken_checkpoint(checkpoints, data):
    (checkpoints / f"{NAME}.json").write_bytes(data)
    _passed_over(checkpoints)


def test_a_record_that_is_too_large_is_not_read(checkpoints):
    with (checkpoints / f"{NAME}.json").open("r+b") as file:
        file.truncate(1 << 40)
    assert "1,099,511,627,776 bytes" in _passed_over(checkpoints)


def test_a_record_with_very_many_names_is_neither_read_nor_written(checkpoints, tmp_path, monkeypatch):
    entry = {"path": "x", "size": 1, "xxh3_128": "0" * 32}
    _sign(checkpoints, _content(checkpoints) | {"files": [entry] * (record_module.MOST_NAMES + 1)})
    assert "names more than 250,000 files" in _passed_over(checkpoints)
    monkeypatch.setattr(record_module, "MOST_NAMES", 1)
    with refusal(UnstorableStateError):
        save(tmp_path / "step-00000001", {"global_step": 1, "state_dict": {"w": torch.ones(2)}})


def test_a_state_that_would_make_it_too_large_is_refused_when_it_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(record_module, "LARGEST_RECORD_BYTES", 10_000)
    with refusal(UnstorableStateError):
        save(tmp_path / "step-00000001", {"global_step": 1, "genlight": {"state": list(range(10_000))}})


@pytest.mark.parametrize("place", ["final.json", f"{NAME}/training_state.json", f"{NAME}/model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_device_in_place_of_a_file_is_not_read(checkpoints, place, kind):
    path = checkpoints / place
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    if place == "final.json":
        with refusal(BrokenCheckpointError):
            find_final(checkpoints)
        assert newest_valid(checkpoints)[0].step == 2
    else:
        assert "not a regular file" in _passed_over(checkpoints)


def test_hashing_ends_at_the_recorded_size(tmp_path):
    with (tmp_path / "grows").open("w+b") as file:
        file.truncate(1 << 42)
        size, _ = _hash_descriptor(file.fileno(), most=1000)
    assert size < 1 << 30


# paths that a hook, or somebody else, put into a record


@pytest.mark.parametrize(
    "named",
    ["/etc/passwd", "../../../../etc/passwd", "/old/final/../../etc/passwd", "link", "a\0b", "\ud800", 7, None, ["x"]],
)
def test_a_path_for_upload_outside_of_the_checkpoint_is_ignored(tmp_path, named):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "link").symlink_to("/etc/passwd")
    (tmp_path / "final.json").write_text(json.dumps({"state": {}, "trainer_checkpoint": {"primary_path": named}}))
    assert read_record(tmp_path / "final.json").primary_path is None


def test_a_path_outside_of_the_hooks_folder_is_ignored(checkpoints):
    _sign(checkpoints, _content(checkpoints) | {"trainer_checkpoint": {"primary_path": "../model.safetensors"}})
    assert verify(checkpoints / NAME).primary_path is None


# headers


def _header(text, data=b""):
    encoded = text if isinstance(text, bytes) else json.dumps(text).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def _tensor(**changes):
    return {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}


HEADERS = {
    "empty": b"",
    "seven bytes": b"1234567",
    "no text": _header(b"\xff\xfe"),
    "longer than the file": (1 << 62).to_bytes(8, "little"),
    "a list": _header([]),
    "null": _header(None),
    "deep": _header(b'{"w":' * 100_000),
    "deep lists": _header(b"[" * 1_000_000),
    "2M digits": _header(b'{"w":{"dtype":"F32","shape":[' + b"9" * 2_000_000 + b'],"data_offsets":[0,16]}}'),
    "no tensor": _header({"w": 7}),
    "other bytes": _header(_tensor(), bytes(17)),
    "fewer bytes": _header(_tensor(), bytes(15)),
    **{
        f"{member} {value!r:.40}": _header(_tensor(**{member: value}), bytes(16))
        for member, values in {
            "shape": [[-2, -2], [2.0, 2], [1 << 40], "22", None, [None], [[2], 2], {}, 7, [2**64], [2] * 100, [True]],
            "dtype": [["F32"], None, 7, "", "F4", "O", "f32", {}],
            "data_offsets": [None, [0], [0, 16, 16], [16, 0], ["0", "16"], [0.0, 16.0], [-16, 0], [None, None], 16],
        }.items()
        for value in values
    },
}


@pytest.mark.parametrize("data", HEADERS.values(), ids=HEADERS)
def test_a_malformed_header_is_a_broken_checkpoint(checkpoints, data):
    _replace(checkpoints, "model.safetensors", data)
    assert "model.safetensors" in _passed_over(checkpoints)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
NUMBERS = st.sampled_from([0, 1, 2, 4, 16, -1, 2**31, 2**40, 2**63, 2**64, 10**30])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BOOL", "C64", "O", ""]) | JSON,
        "shape": st.lists(NUMBERS, max_size=3) | JSON,
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | JSON,
    }
)


HEADER_TEXTS = st.dictionaries(st.text(max_size=5), ENTRIES | JSON, max_size=3).map(
    lambda text: json.dumps(text).encode()
)


@given(HEADER_TEXTS | st.binary(max_size=300), st.integers(0, 40))
@settings(max_examples=400)
def test_any_header_is_read_or_refused(header, nbytes):
    with contextlib.suppress(ValueError):
        assert sum(tensor.nbytes for tensor in parse_header(header, nbytes).values()) == nbytes


# values and references


def _with_state(folder, state):
    """Change only the trainer's payload."""
    _sign(folder, _content(folder) | {"state": state})


def _reference(folder, **changes):
    (weights,) = [item for key, item in _content(folder)["state"].items() if key == "weights"]
    return {"$tensor": {**weights["$tensor"], **changes}}


VALUES = {
    "$int": ["0x" + "f" * 2_000_000 + "g", 7],
    "$float": [[]],
    "$dict": [[[1]], [[[], 1]], 7],
    "$tuple": [7],
    "$set": [[[]]],
    "$bytes": ["not base64"],
    "$complex": [[1, 2, 3]],
    "$path": [7],
    "$default": [["eval", []]],
    "$deque": [[-1, []]],
    "$arguments": [{"a": {"$set": [{}]}}, 7],
    "$namedtuple": [[7, []], ["os:stat_result", []]],
    "$dataclass": [["x"], ["dataclasses:Field", {}]],
    "$enum": [[1, 2], ["enum:Flag", "NONE"]],
    "$wrapper": [["os:PathLike", {}]],
    "$torch": [7, "load"],
    "$unheard": [1],
    "$device": ["cuda:99999999999", "nowhere", []],
    "$size": ["x", [-1], [2**70]],
    "$npscalar": [["<f4", "00"], ["|O", "0000000000000000"], ["((((", "00"]],
    "$tensor": [7, {"file": "model.safetensors", "key": "w", "sharded": {"dtype": "float32", "shape": [1 << 40]}}],
    "$ndarray": [{}, ["<i8", [4], 7]],
    "$sparse": [[], [1, 2, [3], True], 7],
}


@pytest.mark.parametrize(
    "value", [{tag: content} for tag, found in VALUES.items() for content in found], ids=lambda value: repr(value)[:60]
)
def test_a_malformed_value_is_a_broken_checkpoint(checkpoints, value):
    _with_state(checkpoints, {"a": value})
    _passed_over(checkpoints)


@pytest.mark.parametrize("tag", ["$enum", "$dataclass", "$namedtuple", "$wrapper"])
def test_a_type_that_the_trainer_does_not_have_is_passed_over_once_that_is_imported(checkpoints, config_of, tag):
    content = {"$enum": "A", "$dataclass": {}, "$namedtuple": [], "$wrapper": {}}[tag]
    _with_state(checkpoints, {"a": {tag: ["trainer_of_job:Kind", content]}})
    config = config_of(f"checkpoints_dir={checkpoints}", resume_from_latest=True)
    start = decide_start(config)
    assert start.record.step == 2  # the trainer may have it

    start = decide_start(config, import_types=lambda: None)
    assert start.record.step == 1
    assert "trainer_of_job" in start.warnings[0]


def test_a_duplicate_key_is_a_broken_checkpoint(checkpoints):
    path = newest_valid(checkpoints)[0].path
    text = path.read_bytes()
    body = text[: text.rindex(b',"digest"')].replace(b'"step":2', b'"step":1,"step":2')
    path.write_bytes(body + b',"digest":"xxh3_128:' + digest_of(body).encode() + b'"}\n')
    _passed_over(checkpoints)


def test_a_run_continues_from_the_checkpoint_before(checkpoints, config_of):
    _with_state(checkpoints, {"a": {"$deque": [10**30, []]}})
    start = decide_start(config_of(f"checkpoints_dir={checkpoints}", resume_from_latest=True))
    assert start.record.step == 1
    (warning,) = start.warnings
    assert "its state is malformed: OverflowError" in warning
    assert "falling back to the one before it" in warning


def test_values_nested_more_deeply_than_python_goes_are_a_broken_checkpoint(checkpoints):
    deep = "7"
    for _ in range(300):
        deep = f'{{"$tuple":[{deep}]}}'
    _with_state(checkpoints, json.loads(deep))
    _passed_over(checkpoints)


@pytest.mark.parametrize(
    ("wrapped", "levels"), [(lambda value: {1: value}, MAX_DEPTH - 2), (lambda value: (value,), MAX_DEPTH // 2 - 2)]
)
def test_a_state_at_the_limit_of_depth_is_accepted(tmp_path, wrapped, levels):
    state = 7
    for _ in range(levels):
        state = wrapped(state)
    save(tmp_path / "step-00000001", {"global_step": 1, "genlight": {"state": {"a": state}}})
    assert newest_valid(tmp_path)[1] == []
    assert load(tmp_path / "step-00000001")["genlight"]["state"]["a"] == state


TIB = 1 << 40
CHANGES = [
    {"dtype": "float32", "shape": [TIB]},
    {"dtype": "float32", "shape": [-2, -3]},
    {"dtype": "float32", "shape": "23"},
    {"dtype": ["float32"], "shape": [2, 3]},
    {"dtype": "float32"},
    {"stride": [TIB, 1]},
    {"stride": [-3, 1]},
    {"stride": [3]},
    {"stride": [0, 0]},
    {"stride": [1, 1]},
    {"dtype": "torch.load", "shape": [6]},
    {"dtype": "float99", "shape": [2, 3]},
    {"stride": None, "key": "nothing"},
    {"file": None},
    {"file": "../model.safetensors"},
    {"key": []},
    {"requires_grad": "yes"},
    {"view": {"offset": 0}},
]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: repr(changes)[:70])
def test_a_reference_to_missing_bytes_is_a_broken_checkpoint(checkpoints, changes):
    _with_state(checkpoints, {"a": _reference(checkpoints, **changes)})
    _passed_over(checkpoints)


def test_a_load_checks_a_reference_before_it_takes_memory(checkpoints, monkeypatch):
    _with_state(checkpoints, {"a": _reference(checkpoints, stride=[TIB, 1])})
    monkeypatch.setattr(torch, "empty_strided", lambda *_, **__: pytest.fail("took memory"))
    with pytest.raises(BrokenCheckpointError):
        load(checkpoints / NAME)


@pytest.mark.parametrize(
    ("dtype", "shape", "changes"),
    [
        ("|O", [4], {}),
        ("<i8", [TIB], {}),
        ([["a"]], [4], {}),
        ("x" * 50, [4], {}),
        ("<i8", [-4], {}),
        ("<i8", [-2, -2], {}),
        ("<i8", ["4"], {}),
        ("<i8", 4, {}),
        ("<i8", [4], {"key": "x"}),
        ("<i8", [4], {"requires_grad": True}),
        ("<i8", [4], {"dtype": "int64", "shape": [4]}),
    ],
    ids=repr,
)
def test_an_array_that_does_not_fit_its_bytes_is_a_broken_checkpoint(checkpoints, dtype, shape, changes):
    *_, octets = _content(checkpoints)["state"]["array"]["$ndarray"]
    _with_state(checkpoints, {"a": {"$ndarray": [dtype, shape, {"$tensor": {**octets["$tensor"], **changes}}]}})
    _passed_over(checkpoints)


STATE_FILES = [b"", b"[]", b"{}", b"\xff", b'{"checkpoint":7}', b'{"checkpoint":{"a":{"$set":7}}}', b"[" * 1_000_000]


@pytest.mark.parametrize("data", STATE_FILES, ids=lambda data: repr(data[:40]))
def test_a_malformed_state_file_is_a_broken_checkpoint(checkpoints, data):
    _replace(checkpoints, "training_state.json", data)
    _passed_over(checkpoints)


PARTS = {
    "a random state of another Python": {"genlight": {"rng": [{"python": {"version": 9}}]}},
    "words of another length": {"genlight": {"rng": [{"python": {"words": "octets"}}]}},
    "a random state of torch that is none": {"genlight": {"rng": [{"torch": "words"}]}},
    "a rank that is none": {"genlight": {"rng": [{"generators": 7}]}},
    "infinite time": {"genlight": {"elapsed_s": {"$float": "inf"}}},
    "time in words": {"genlight": {"elapsed_s": "x"}},
    "gradients that are none": {"genlight": {"gradients": [{"w": 7}]}},
    "a version that is none": {"pytorch-lightning_version": 7},
    "a version in words": {"pytorch-lightning_version": "newest"},
    "callbacks": {"callbacks": 7},
    "loops": {"loops": {"fit_loop": None}},
    "schedules": {"lr_schedulers": [7]},
    "optimizers": {"optimizer_states": {"$tuple": [[]]}},
    "run state": {"genlight_run_state": [1]},
    "epoch": {"epoch": 1.5},
    "weights": {"state_dict": []},
}


@pytest.mark.parametrize("parts", [{}, *PARTS.values()], ids=["as saved", *PARTS])
def test_a_part_that_lightning_or_genlight_cannot_restore_is_a_broken_checkpoint(checkpoints, parts):
    """It would end each start with an error that names no checkpoint."""
    generator_state = torch.get_rng_state()
    rng = {"python": {"version": 3, "words": torch.zeros(625, dtype=torch.int64), "gauss": None}}
    rng |= {"torch": generator_state, "numpy": {}, "devices": {}, "generators": [generator_state]}
    content = {
        "pytorch-lightning_version": "2.6.0.dev0+cpu",
        "global_step": 2,
        "epoch": 0,
        "state_dict": {"w": torch.ones(2, 2)},
        "loops": {"fit_loop": {}},
        "callbacks": {},
        "optimizer_states": [{}],
        "lr_schedulers": [{}],
        "genlight_run_state": {},
        "genlight": {"elapsed_s": 1.0, "rng": [rng], "gradients": [{"w": torch.ones(2, 2)}]},
    }
    delete_checkpoint(checkpoints / NAME)
    save(checkpoints / NAME, content, meta=RecordMeta(run_id="r"))
    stored = json.loads((checkpoints / NAME / "training_state.json").read_bytes())
    by_name = dict(stored["checkpoint"]["$dict"])
    own = by_name["genlight"]["rng"][0]
    tensors = {"words": own["python"]["words"], "octets": own["torch"]}
    for name, value in parts.items():
        by_name[name] = _merged(by_name[name], value, tensors)
    stored["checkpoint"]["$dict"] = list(by_name.items())
    _replace(checkpoints, "training_state.json", json.dumps(stored, separators=(",", ":")).encode())
    if parts:
        assert "its checkpoint is malformed" in _passed_over(checkpoints)
    else:
        assert newest_valid(checkpoints)[0].step == 2


def _merged(stored, changes, tensors):
    """`stored` with some values changed; the name of a tensor stands for its reference."""
    if isinstance(stored, dict) and isinstance(changes, dict) and stored.keys() & changes.keys():
        return stored | {name: _merged(stored[name], value, tensors) for name, value in changes.items()}
    if isinstance(stored, list) and isinstance(changes, list) and stored and len(stored) == len(changes):
        return [_merged(old, new, tensors) for old, new in zip(stored, changes, strict=True)]
    return tensors.get(changes, changes) if isinstance(changes, str) else changes


@pytest.mark.parametrize("constant", [b"NaN", b"-Infinity", b"Infinity"])
def test_a_number_that_json_does_not_have_is_a_broken_checkpoint(checkpoints, constant):
    content = json.loads((checkpoints / NAME / "training_state.json").read_bytes())
    data = json.dumps({**content, "more": "X"}).encode().replace(b'"X"', constant)
    _replace(checkpoints, "training_state.json", data)
    assert "not a JSON number" in _passed_over(checkpoints)


def test_a_tensor_whose_elements_overlap_is_stored_by_its_values(tmp_path):
    """Its range is as large as its number of elements, but some of that it uses twice."""
    overlapping = torch.arange(9.0).as_strided((3, 3), (2, 2))
    save(tmp_path / "step-00000001", {"global_step": 1, "genlight": {"state": {"a": overlapping}}})
    assert newest_valid(tmp_path)[1] == []
    assert torch.equal(load(tmp_path / "step-00000001")["genlight"]["state"]["a"], overlapping)


TAGS = st.sampled_from([*VALUES, "$ordered", "$counter", "$slice", "$new"])
SHAPES = st.lists(NUMBERS, max_size=3)
REFERENCES = st.fixed_dictionaries(
    {
        "file": st.sampled_from(["training_state.safetensors", "model.safetensors", "x"]),
        "key": st.sampled_from(["state.weights", "state.array", "x"]),
    },
    optional={
        "dtype": st.sampled_from(["float32", "int64", "<i8", "|O", "float99"]) | JSON,
        "shape": SHAPES | JSON,
        "stride": SHAPES | JSON,
        "sharded": JSON,
        "device": st.sampled_from(["cpu", "meta:0", "x"]) | JSON,
    },
)
TREES = st.recursive(
    JSON | st.builds(lambda tag, reference: {tag: reference}, st.sampled_from(["$tensor", "$ndarray"]), REFERENCES),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(lambda tag, content: {tag: content}, TAGS, st.lists(inner, max_size=3) | inner)
    ),
    max_leaves=6,
)


@given(TREES, st.sampled_from(sorted(WRONG)), JSON, st.sampled_from(["tree", "member", "both"]))
@settings(max_examples=2000 if os.environ.get("GENLIGHT_LONG_FAULTS") else 120)
def test_the_search_for_a_checkpoint_ends_with_any_state_or_member(template, checkpoints, tree, member, value, what):
    state = {"state": {"a": tree}} if what != "member" else {}
    _sign(checkpoints, _content(template) | state | ({member: value} if what != "tree" else {}))
    record, warnings = newest_valid(checkpoints)
    assert record is not None
    assert len(warnings) <= 1
    with contextlib.suppress(CheckpointError):
        load(checkpoints / NAME)


# slices of several ranks

SLICED = {
    "file": "model.safetensors",
    "key": "w",
    "dtype": "float32",
    "shape": [4, 2],
    "slices": [
        {"rank": 0, "box": {"offset": [0, 0], "shape": [2, 2]}, "begin": 64, "xxh3_128": "0" * 32},
        {"rank": 1, "box": {"offset": [2, 0], "shape": [2, 2]}, "begin": 64, "xxh3_128": "0" * 32},
    ],
}
SIZES = {"rank-00000/model.safetensors": 80, "rank-00001/model.safetensors": 80}


WRONG_TENSORS = {
    "shape": [[], [TIB, TIB], "42"],
    "dtype": [["float32"], "float99", "float64"],
    "file": [None, "../model.safetensors"],
    "slices": [[]],
}
WRONG_SLICES = {
    "rank": [1, -1, 7],
    "box": [
        *({"offset": offset, "shape": [2] * len(offset)} for offset in ([0], [1, 0])),
        *({"offset": [0, 0], "shape": shape} for shape in ([-2, -2], [0, 2])),
    ],
    "begin": [-1, 65, 2**70],
    "xxh3_128": [None, 7],
}


@pytest.mark.parametrize(
    ("is_slice", "member", "value"),
    [
        (wrong is WRONG_SLICES, member, value)
        for wrong in (WRONG_TENSORS, WRONG_SLICES)
        for member, values in wrong.items()
        for value in values
    ],
    ids=repr,
)
def test_a_malformed_index_of_slices_is_refused(is_slice, member, value):
    first, second = SLICED["slices"]
    change = {"slices": [first | {member: value}, second]} if is_slice else {member: value}
    with pytest.raises(ValueError, match=r"'w'|Expected"):
        parse_slices(json.dumps([SLICED | change]).encode(), SIZES)


@given(st.binary(max_size=50) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_index_is_read_or_refused(data):
    with contextlib.suppress(ValueError):
        parse_slices(data, SIZES)


def test_a_sound_index_is_read():
    data = json.dumps([SLICED]).encode()
    assert json.loads(msgspec.json.encode(parse_slices(data, SIZES))) == [SLICED]
