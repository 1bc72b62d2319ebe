"""SAM, MAML, compiled steps, float64, gradients by hand and fake quantisation in half precision: near, or refused."""

from __future__ import annotations

import pytest

from genlight.adapter.contract.exceptions import ContractError
from zoo import precision_methods, runs

pytestmark = [
    # torch.compile about what it leaves to Python, and about a loss whose gradient nobody wants.
    pytest.mark.filterwarnings("ignore:.*Dynamo does not know:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf:UserWarning"),
]

MODULE = "zoo.precision_methods"
NAMES = list(precision_methods.ZOO)
REFUSED = {
    ("FirstOrderMaml", "16-mixed"): r"a SGD that it made, by gradients that have the scale of 16-mixed. Use bf16-mixed",
    ("SamWithClosure", "16-mixed"): r"16-mixed cannot host Sam.step\(closure\).*or use bf16-mixed or 32-true",
    ("PerSampleGradients", "16-mixed"): r"mixes types: under fp16-mixed.*p.grad = g.to\(p.dtype\)",
    ("PerSampleGradients", "bf16-mixed"): r"mixes types: under bf16-mixed.*p.grad = g.to\(p.dtype\)",
}


def hosted(name: str, precision: str):
    module, _ = runs.hosted_run(f"{MODULE}:{name}", **runs.precision_of(precision))
    return module, runs.weights(module.contract_state, module.plugin)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_near_to_fp32_or_refused_with_the_way_out(name, precision):
    if (name, precision) in REFUSED:
        with pytest.raises(ContractError, match=REFUSED[name, precision]):
            hosted(name, precision)
        return

    module, actual = hosted(name, precision)

    assert not module._router.overflow_steps
    runs.assert_close(actual, runs.plain_run(f"{MODULE}:{name}"), 0.02)


@pytest.mark.parametrize("name", NAMES)
def test_one_process_in_fp32_is_bit_equal_to_plain_torch(name):
    _, actual = hosted(name, "32-true")

    runs.assert_close(actual, runs.plain_run(f"{MODULE}:{name}"), 0)
