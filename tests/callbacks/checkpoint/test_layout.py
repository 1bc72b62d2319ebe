"""The layout of a save is reused by the next one as long as only values change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from genlight.callbacks.checkpoint import CheckpointStore, RecordMeta, load, save
from genlight.callbacks.checkpoint.capture import capture
from genlight.callbacks.checkpoint.storage import Staging

State = dict[str, Any]


def make_state() -> State:
    tied, base, wave = torch.randn(3, 4), torch.arange(12.0), torch.randn(4, dtype=torch.complex64)
    moments = {
        number: {"step": torch.tensor(float(number)), "exp_avg": torch.randn(3, 4), "exp_avg_sq": torch.rand(5)}
        for number in range(3)
    }
    return {
        "global_step": 7,
        "state_dict": {"a": tied, "b": tied, "c": torch.randn(5), "empty": torch.empty(0, 3)},
        "optimizer_states": [{"state": moments, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}],
        "genlight": {
            "state": {
                "views": [base, base[2:], base.view(3, 4).t()],
                "waves": [wave, wave, wave.imag, wave.imag],
                "alike": {(1, 2): {"x": torch.zeros(1)}, "y": torch.ones(2), "(1, 2)": {"x": torch.ones(1)}},
                "text": "\ud800",
                "plain": 2**70,
            }
        },
    }


def moment(state: State) -> dict[str, torch.Tensor]:
    of_first: dict[str, torch.Tensor] = state["optimizer_states"][0]["state"][0]
    return of_first


def payload(state: State) -> dict[str, Any]:
    of_trainer: dict[str, Any] = state["genlight"]["state"]
    return of_trainer


def only_values(state: State) -> None:
    for tensor in (*state["state_dict"].values(), *moment(state).values()):
        tensor.add_(1)
    payload(state)["text"], state["global_step"] = "other", 8


def rename_last(state: State) -> None:
    name = next(reversed(moment(state)))
    moment(state)[f"{name}x"] = moment(state).pop(name)


def replace_wave(state: State, at: int, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    waves = payload(state)["waves"]
    waves[at] = view(waves[0])


CHANGES: dict[str, Callable[[State], object]] = {
    "nothing": lambda state: None,
    "values": only_values,
    "new tensors of the same form": lambda state: state["state_dict"].update(c=torch.randn(5)),
    "a name": lambda state: state["state_dict"].update(d=state["state_dict"].pop("c", torch.ones(5))),
    "only a name": rename_last,
    "the order": lambda state: state["state_dict"].update(a=state["state_dict"].pop("a")),
    "a shape": lambda state: moment(state).update(exp_avg=torch.randn(4, 3)),
    "strides": lambda state: moment(state).update(exp_avg=torch.randn(4, 3).t()),
    "a type": lambda state: moment(state).update(exp_avg=torch.randn(3, 4).half()),
    "a shape in place": lambda state: moment(state)["exp_avg"].resize_(2, 6),
    "data in place": lambda state: setattr(moment(state)["exp_avg"], "data", torch.randn(6)),
    "memory that is no longer shared": lambda state: state["state_dict"].update(b=torch.randn(3, 4)),
    "memory that is shared now": lambda state: moment(state).update(exp_avg=state["state_dict"]["a"]),
    "another view": lambda state: payload(state)["views"].__setitem__(1, payload(state)["views"][0][3:]),
    "a view of it": lambda state: moment(state).update(exp_avg_sq=state["state_dict"]["c"][:]),
    "a parameter": lambda state: moment(state).update(exp_avg=torch.nn.Parameter(torch.randn(3, 4))),
    "a frozen parameter": lambda state: moment(state).update(exp_avg=torch.nn.Parameter(torch.ones(3, 4), False)),
    "a gradient": lambda state: moment(state)["exp_avg"].requires_grad_(),
    "a conjugate": lambda state: moment(state).update(exp_avg=torch.randn(3, 4, dtype=torch.complex64).conj()),
    "a negative view": lambda state: moment(state).update(exp_avg=torch.randn(3, 4, dtype=torch.cfloat).conj().imag),
    "a conjugate of the same memory": lambda state: replace_wave(state, 1, torch.Tensor.conj),
    "a negative view of the same memory": lambda state: replace_wave(state, 3, lambda wave: wave.conj().imag),
    "one more": lambda state: payload(state).update(more=torch.randn(2)),
    "one less": lambda state: payload(state)["views"].pop(),
    "a key of another type": lambda state: payload(state).update({"views": {0: torch.zeros(1), "0": torch.ones(1)}}),
    "a dictionary of another type": lambda state: state["optimizer_states"][0]["state"].update(
        {0: OrderedDict(moment(state))}
    ),
    "a name that is a tag": lambda state: payload(state)["alike"]["(1, 2)"].update({"$x": torch.ones(1)}),
    "a number in place of a tensor": lambda state: moment(state).update(step=3.0),
    "a sparse tensor": lambda state: payload(state).update(more=torch.eye(3).to_sparse()),
}


@pytest.fixture
def store() -> Iterator[CheckpointStore]:
    made = CheckpointStore()
    yield made
    made.close()


@pytest.mark.parametrize("change", CHANGES)
def test_a_save_after_a_change_equals_a_first_save(change: str, store: CheckpointStore, tmp_path: Path) -> None:
    state = make_state()
    for number in range(2):
        store.save(tmp_path / str(number), state, asynchronous=True).result()
        CHANGES[change](state)
    record = store.save(tmp_path / "reused", state, asynchronous=True).result()
    alone = save(tmp_path / "alone", state)

    assert record is not None
    contents = [{each.file_name(file): file.xxh3_128 for file in each.files} for each in (record, alone)]
    assert contents[0] == contents[1]
    assert record.state == alone.state
    weights = dict(load(tmp_path / "reused")["state_dict"])
    torch.testing.assert_close(weights, state["state_dict"], rtol=0, atol=0)


def taken_apart(state: State, earlier: Any = None) -> Any:
    return capture(state, RecordMeta(), Staging(Path("a.json"), Path("a")), earlier)


def test_a_layout_is_reused_for_other_values_and_holds_no_tensor() -> None:
    state = make_state()
    first = taken_apart(state)
    only_values(state)

    again = taken_apart(state, first.layout)
    state["state_dict"]["more"] = torch.ones(1)
    other = taken_apart(state, first.layout)

    assert again.layout is first.layout
    assert again.entries is first.entries
    assert other.layout is not first.layout
    assert all(source.data_ptr() == old.data_ptr() for source, old in zip(again.sources, first.sources, strict=True))
