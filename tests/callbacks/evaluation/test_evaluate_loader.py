"""A function over a validation loader: its scores, and a training that goes on as if it had not been called."""

from __future__ import annotations

import pytest
import torch

from genlight.adapter import ContractError
from genlight.callbacks import EvaluateLoader, Hook


class Heard(Hook):
    reads = ("eval_scores",)

    def __init__(self) -> None:
        self.scores: list[tuple[int, dict[str, float]]] = []
        self.modes: list[bool] = []
        self.drawn: list[float] = []

    def on_train_batch_start(self, trainer, pl_module, *_):
        self.modes.append(pl_module.layer.training)
        self.drawn.append(torch.rand(1).item())

    def on_scores(self, trainer, pl_module, scores, step):
        self.scores.append((step, dict(scores)))


def loader() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(torch.arange(40.0).view(10, 4), batch_size=5, shuffle=True)


def mean_of_inputs(module, batches):
    assert not module.training
    assert not torch.is_grad_enabled()
    torch.rand(3)
    batches = list(batches)
    outputs = [module.layer(batch) for batch in batches]
    return {
        "val/output": torch.cat(outputs).mean(),
        "val/input": torch.cat(batches).mean(),
        "val/batches": len(batches),
    }


def test_scores_come_at_the_cadence_and_training_is_as_without_them(fit_plain) -> None:
    weights = []
    for evaluations in ([], [EvaluateLoader(loader(), mean_of_inputs, 3)]):
        torch.manual_seed(0)
        heard = Heard()
        callbacks = [heard, *evaluations] if evaluations else [_without_reads(heard)]
        trainer = fit_plain(callbacks, steps=7)
        weights.append((trainer.lightning_module.layer.weight.detach().clone(), heard.drawn))
    assert [step for step, _ in heard.scores] == [3, 6]
    assert all(scores["val/input"] == 19.5 and scores["val/batches"] == 2.0 for _, scores in heard.scores)
    assert heard.scores[0][1]["val/output"] != heard.scores[1][1]["val/output"]
    assert heard.modes == [True] * 7
    assert torch.equal(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


def _without_reads(heard: Heard) -> Heard:
    heard.reads = ()
    return heard


def test_batches_have_the_precision_of_the_module(fit_plain) -> None:
    seen = []

    def dtypes(module, batches):
        seen.extend((batch.dtype, module.layer(batch).dtype) for batch in batches)
        return {}

    fit_plain([EvaluateLoader(loader(), dtypes, 4)], precision="bf16-true")
    fit_plain([EvaluateLoader(loader(), dtypes, 4)], precision="bf16-mixed")
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 2 + [(torch.float32, torch.bfloat16)] * 2


def test_a_failure_is_forgiven_and_leaves_no_mode_behind(fit_plain) -> None:
    def fails(module, batches):
        raise RuntimeError("out of luck")

    heard = Heard()
    evaluate = EvaluateLoader(loader(), fails, 1)
    fit_plain([heard, evaluate], steps=5)
    assert evaluate.failures == {"on_train_batch_end": 5}
    assert heard.modes == [True] * 5


def test_what_is_no_mapping_of_numbers_is_named(fit_plain) -> None:
    with pytest.raises(ContractError, match="the function of EvaluateLoader returned a float; it must be a mapping"):
        fit_plain([EvaluateLoader(loader(), lambda *_: 1.0, 1, critical=True)])


def test_arguments_that_make_no_sense_are_named() -> None:
    with pytest.raises(TypeError, match=r"`function`. Expected a callable, but received 3"):
        EvaluateLoader(loader(), 3, 1)
    with pytest.raises(TypeError, match=r"Expected one that can be read several times, but received a list_iterator"):
        EvaluateLoader(iter([1]), mean_of_inputs, 1)
