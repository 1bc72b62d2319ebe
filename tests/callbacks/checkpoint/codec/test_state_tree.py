"""The codec of state trees: values come back equal and with equal types; everything else is refused by path."""

import argparse
import collections
import dataclasses
import datetime as dt
import enum
import fractions
import functools
import json
import math
import pathlib
import random
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from genlight.adapter.contract.exceptions import CheckpointError, UnstorableStateError
from genlight.callbacks.checkpoint import load, save
from support.messages import refusal

pytestmark = pytest.mark.promise(name="checkpoint")


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 3


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: float
    y: torch.Tensor


@dataclasses.dataclass
class Meter:
    total: float
    history: list


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    value: int


@dataclasses.dataclass
class Closes:
    path: str

    def __del__(self):
        pass


def round_trip(directory, value):
    save(directory / "a", {"genlight": {"state": {"value": value}}})
    return load(directory / "a")["genlight"]["state"]["value"]


def same(one, other):
    """Whether two values are equal in value, type, and the properties of tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            (one.dtype, one.shape, one.requires_grad, one.layout)
            == (other.dtype, other.shape, other.requires_grad, other.layout)
            and steps(one) == steps(other)
            and bits(one) == bits(other)
        )
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    if isinstance(one, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (one != one and other != other)
    if isinstance(one, complex):
        return same([one.real, one.imag], [other.real, other.imag])
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def steps(tensor):
    """Return the strides of the dimensions that have several elements."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and tensor.numel()]


def bits(tensor):
    row_major = tensor.detach().clone(memory_format=torch.contiguous_format)
    return row_major.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


TYPES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
)
DTYPES = [getattr(torch, name) for name in TYPES.split()]
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
KEYS = st.one_of(
    st.text(max_size=4), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text(max_size=2))
)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    data = bytes(draw(st.binary(min_size=1, max_size=4)))
    count = math.prod(shape) * dtype.itemsize
    raw = (data * (count // len(data) + 1))[:count]
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    tensor = flat.clone().view(dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)
    return tensor.permute(*reversed(range(tensor.dim()))) if draw(st.booleans()) and tensor.dim() > 1 else tensor


ARRAYS = st.builds(
    lambda kind, shape, order: np.arange(math.prod(shape)).reshape(shape).astype(kind).copy(order=order),
    st.sampled_from(["f4", "f8", ">i4", "b1", "U3", "S2", "c16", "M8[s]", "u1", "f2"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from("CF"),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    FLOATS,
    st.text(),
    st.binary(max_size=8),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([Color.RED, Level.LOW, Access.READ, Slotted(3), pathlib.Path("a/b")]),
    st.sampled_from([torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])]),
    st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("é"), np.float64("nan")]),
    tensors(),
    ARRAYS,
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$tensor", "$tuple", "$dict", "a"]), inner, max_size=2),
        st.lists(inner, max_size=3).map(lambda items: collections.deque(items, maxlen=5)),
        st.dictionaries(st.text(max_size=2), inner, max_size=2).map(collections.OrderedDict),
        st.dictionaries(st.integers(), inner, max_size=2).map(lambda d: collections.defaultdict(list, d)),
        st.builds(Meter, FLOATS.filter(lambda x: x == x), st.lists(st.integers(), max_size=2)),
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(value=TREES)
def test_any_tree_comes_back_equal_in_value_and_type(tmp_path_factory, value):
    assert same(round_trip(tmp_path_factory.mktemp("t"), value), value)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2, 3},
        frozenset({("a", 1), None}),
        collections.Counter("abca"),
        {1: "int", "1": "str", True and 2: "two", 1.5: "float", None: "none", (1, (2,)): "tuple"},
        10**5000,
        -(2**64),
        "\ud800 lone surrogate",
        {"": {"$": 1}},
        collections.defaultdict(None, a=1),
        argparse.Namespace(lr=0.1, sizes=(1, 2), nested=argparse.Namespace()),
        random.Random(3).getstate(),
        np.random.default_rng(1).bit_generator.state,
        np.str_(""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_hypothesis_seldom_makes_come_back_too(tmp_path, value):
    loaded = round_trip(tmp_path, value)
    assert type(loaded) is type(value)
    assert loaded == value


def test_parameters_gradients_flags_and_named_tuples_are_kept(tmp_path):
    value = [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True), Point(1.5, torch.zeros(1))]
    loaded = round_trip(tmp_path, value)
    assert isinstance(loaded[0], torch.nn.Parameter)
    assert [tensor.requires_grad for tensor in loaded[:2]] == [True, True]
    assert type(loaded[2]) is Point
    assert loaded[2].x == 1.5


def test_sparse_tensors_and_lazy_conjugates_are_kept_as_values(tmp_path):
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,), check_invariants=True).coalesce()
    conjugate = torch.tensor([1 + 2j]).conj()
    loaded = round_trip(tmp_path, [sparse, conjugate, -torch.tensor([1 + 2j]).conj().imag])
    assert loaded[0].is_coalesced()
    assert torch.equal(loaded[0].to_dense(), sparse.to_dense())
    assert torch.equal(loaded[1], conjugate.resolve_conj())


def test_one_element_of_a_column_is_kept(tmp_path):
    """torch calls it contiguous, whatever its stride is."""
    value = [torch.arange(4.0)[::2][:1], torch.arange(6.0).view(3, 2)[:1, 1]]
    assert same(round_trip(tmp_path, value), value)


def test_a_repeated_tensor_stays_one_object_and_other_views_become_independent(tmp_path):
    base = torch.arange(12.0)
    value = {"all": base, "same": base, "row": base[3:6], "matrix": base.view(3, 4).t(), "last": base[-1].expand(3)}
    loaded = round_trip(tmp_path, value)
    assert same({**loaded, "last": loaded["last"].tolist()}, {**value, "last": [11.0] * 3})
    loaded["all"][3] = 99.0
    assert loaded["same"] is loaded["all"]
    assert loaded["row"].tolist() == [3.0, 4.0, 5.0]


def test_independent_parts_of_one_storage_stay_independent(tmp_path):
    flat = torch.arange(10.0)
    one, other = round_trip(tmp_path, [flat[:5], flat[5:]])
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    assert one.untyped_storage().nbytes() == 20


def test_a_repeated_array_shares_memory_again(tmp_path):
    array = np.arange(3)
    one, other = round_trip(tmp_path, [array, array])
    one[1] = 7
    assert other.tolist() == [0, 7, 2]


def test_a_read_only_array_is_kept(tmp_path):
    array = np.broadcast_to(np.arange(3.0), (2, 3))
    assert same(round_trip(tmp_path, array), array.copy())


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        ({"a": [0, {"b": lambda: 0}]}, 'state["value"]["a"][1]["b"]', "function"),
        ((1, {2: object()}), 'state["value"][1][2]', "object"),
        (torch.nn.Linear(1, 1), 'state["value"]', "torch.nn.modules.linear.Linear"),
        (Meter(1.0, [iter(())]), 'state["value"]["history"][0]', "tuple_iterator"),
        ({3: threading_lock} if (threading_lock := random.Random()) else None, 'state["value"][3]', "random.Random"),
        (np.array([object()], dtype=object), 'state["value"]', "numpy.ndarray"),
        (torch.empty(2, device="meta"), 'state["value"]', "torch.Tensor"),
        (np.zeros(3, dtype=[("x", "<f4")]), 'state["value"]', "numpy.ndarray"),
        (collections.defaultdict(lambda: 1), 'state["value"]', "collections.defaultdict"),
        (dt.datetime(2024, 10, 27), 'state["value"]', "datetime.datetime"),
        (fractions.Fraction(1, 3), 'state["value"]', "fractions.Fraction"),
        (Access.READ | Access.WRITE, 'state["value"]', "Access"),
        (Closes("x"), 'state["value"]', "Closes"),
        (int, 'state["value"]', "type"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # without addresses
)
def test_an_unstorable_value_is_refused_by_path(tmp_path, value, path, kind):
    with pytest.raises(UnstorableStateError) as refused:
        round_trip(tmp_path, value)
    assert refused.value.path == path
    assert refused.value.type_name.endswith(kind)


def test_an_unstorable_hyperparameter_is_refused_with_the_way_to_omit_it(tmp_path):
    with refusal(UnstorableStateError):
        save(tmp_path / "a", {"hyper_parameters": {"config": object()}})


def loop():
    tree = [1]
    tree.append({"again": tree})
    return tree


def deep_tree():
    return functools.reduce(lambda tree, _: [tree], range(400), None)


def local_class():
    @dataclasses.dataclass
    class Local:
        x: int

    return Local(1)


@pytest.mark.parametrize("make", [loop, deep_tree, local_class])
def test_a_tree_that_could_not_be_rebuilt_is_refused(tmp_path, make):
    with refusal(UnstorableStateError):
        round_trip(tmp_path, make())


def replace_in_record(path, old, new):
    """Replace bytes of a record and renew its digest, as an attacker would."""
    from genlight.callbacks.checkpoint.format.record import digest_of

    body = path.read_bytes().rpartition(b',"digest"')[0].replace(old, new)
    path.write_bytes(body + b',"digest":"xxh3_128:' + digest_of(body).encode() + b'"}\n')


@pytest.mark.parametrize(
    "name", ["antigravity:Anything", "os:system", "subprocess:Popen", "builtins:dict", "collections:OrderedDict.pop"]
)
def test_a_name_in_a_file_imports_and_runs_nothing(tmp_path, name):
    save(tmp_path / "a", {"genlight": {"state": {"value": Meter(1.0, [])}}})
    module = Meter.__module__.encode()
    replace_in_record(tmp_path / "a.json", b'"' + module + b':Meter"', json.dumps(name).encode())
    with refusal(CheckpointError):
        load(tmp_path / "a")
    assert "antigravity" not in sys.modules


def test_loading_a_dataclass_calls_none_of_its_code(tmp_path, monkeypatch):
    save(tmp_path / "a", {"genlight": {"state": {"value": Meter(1.0, [2])}}})

    def explode(*_):
        raise AssertionError("was called")

    monkeypatch.setattr(Meter, "__init__", explode)
    monkeypatch.setattr(Meter, "__setattr__", explode)
    assert load(tmp_path / "a")["genlight"]["state"]["value"].total == 1.0


@pytest.mark.parametrize(
    ("value", "old", "new"),
    [(Meter(1.0, []), b'"history"', b'"old_history"'), ((1,), b"$tuple", b"$novel")],
    ids=["a dataclass with other fields", "a kind of value from a newer version"],
)
def test_a_value_that_does_not_fit_is_refused(tmp_path, value, old, new):
    save(tmp_path / "a", {"genlight": {"state": {"value": value}}})
    replace_in_record(tmp_path / "a.json", old, new)
    with refusal(CheckpointError):
        load(tmp_path / "a")


def test_a_saved_plain_tree_is_plain_json_in_the_record(tmp_path):
    state = {"best": 0.25, "names": ["a", None, True], "nested": {"count": 3}}
    record = save(tmp_path / "a", {"genlight": {"state": state}})
    assert record.state == state


def test_an_omegaconf_configuration_is_stored_without_the_values_of_interpolations(tmp_path, monkeypatch):
    omegaconf = pytest.importorskip("omegaconf")
    monkeypatch.setenv("GENLIGHT_TEST_SECRET", "hunter2")
    fields = {"a": 1, "b": {"c": [1, "${a}"]}, "secret": "${oc.env:GENLIGHT_TEST_SECRET}", "missing": "???"}
    config = omegaconf.OmegaConf.create(fields)

    back = round_trip(tmp_path, {"config": config, "list": config.b.c, "type": type(config)})

    assert back == {"config": fields, "list": fields["b"]["c"], "type": "DictConfig"}
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]


@pytest.mark.parametrize("key", ["a", ("a", 1), 1, None, Color.RED, frozenset({1}), b"x"])
def test_the_state_of_a_callback_may_have_a_key_of_any_plain_type(tmp_path, key):
    save(tmp_path / "a", {"callbacks": {key: {"count": 1}}})
    assert load(tmp_path / "a")["callbacks"] == {key: {"count": 1}}


def test_a_class_as_the_key_of_a_state_is_refused_with_an_alternative(tmp_path):
    with refusal(UnstorableStateError):
        save(tmp_path / "a", {"callbacks": {Color: {"count": 1}}})
