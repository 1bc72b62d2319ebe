"""SAM, MAML, compiled steps, float64, gradients by hand and fake quantisation in half precision: near, or refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fsdp_harness as harness

from genlight.adapter.contract.exceptions import ContractError

pytestmark = [
    # torch.compile about what it leaves to Python, and about a loss whose gradient nobody wants.
    pytest.mark.filterwarnings("ignore:.*Dynamo does not know:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf:UserWarning"),
]

FILE = "precision_methods.py"
NAMES = list(harness.classes(FILE))
REFUSED = {
    ("SamWithClosure", "16-mixed"): r"16-mixed cannot host Sam.step\(closure\).*or use bf16-mixed or 32-true",
    ("PerSampleGradients", "16-mixed"): r"mixes types: under fp16-mixed.*p.grad = g.to\(p.dtype\)",
    ("PerSampleGradients", "bf16-mixed"): r"mixes types: under bf16-mixed.*p.grad = g.to\(p.dtype\)",
}


def hosted(name: str, precision: str):
    module, _ = harness.base.hosted_run(name, **harness.base.precision_of(precision))
    return module, harness.base.weights(module.contract_state, module.plugin)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_near_to_fp32_or_refused_with_the_way_out(name, precision):
    if (name, precision) in REFUSED:
        with pytest.raises(ContractError, match=REFUSED[name, precision]):
            hosted(name, precision)
        return

    module, actual = hosted(name, precision)

    assert module._router.overflow_steps == 0
    harness.assert_close(actual, harness.plain(FILE, name), 0.02)


@pytest.mark.parametrize("name", NAMES)
def test_one_process_in_fp32_is_bit_equal_to_plain_torch(name):
    _, actual = hosted(name, "32-true")

    harness.assert_close(actual, harness.plain(FILE, name), 0)
