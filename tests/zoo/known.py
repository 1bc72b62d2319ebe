"""Cells of the zoo that are wrong today, each with its cause; an entry whose cell has become right fails the test."""

from __future__ import annotations

BY_HAND = "gradients of parameters that are in no optimizer are not averaged, and these are updated by hand"
BODY_OUTSIDE = "gradients of the body, which is in no optimizer, are not averaged, and the norm goes over them too"
CLONES = "gradients that a clone got, written to `.grad`, are not averaged"
MASTERS = "gradients of a model outside of any optimizer are not averaged before they are copied to its fp32 masters"
REPLACED = "parameters that are replaced while training are unknown to the averaging, which knows those of `configure`"
OWN_LOSSES = "weights are moved by the loss of each rank, without a gradient that could be averaged; not told"
SCRIPT = "TorchScript's own backward fails outside of autocast on gradients in fp16"
CLOSURE = "the scaler calls `step` without its closure, which ends with a bare TypeError"
UNSCALED = "gradients that no backward call scaled end with a bare AssertionError of torch's scaler"
SKIPS = "a rank that calls a sharded module less often than another ends with a connection error that names nothing"
WHOLE_COPIES = "an average that is written through the tensors of `state_dict()` changes whole copies, not the shards"
SCALARS = "torch does not shard parameters of no dimension, and its raw error comes through"
WRAPPERS = "an optimizer that wraps another one is not hosted sharded: torch's raw AttributeError comes through"
SUMMED = "a norm summed by hand, over whole numbers of each rank's shards, is not that of all"

WRONG: dict[str, dict[str, str]] = {
    "FloatMasters": {"ddp": MASTERS, "fsdp": MASTERS},
    "FirstOrderMaml": {"ddp": CLONES},
    "Reptile": {"ddp": CLONES},
    "OptimizerAndByHand": {"ddp": BY_HAND, "fsdp": BY_HAND},
    "HeadOnlyClippedByAll": {"ddp": BODY_OUTSIDE, "fsdp": BODY_OUTSIDE},
    "CenterLoss": {"ddp": BY_HAND, "fsdp": BY_HAND},
    "SplatDensification": {"ddp": REPLACED, "fsdp": REPLACED},
    "EvolutionStrategy": {"ddp": OWN_LOSSES, "fsdp": OWN_LOSSES},
    "Scripted": {"one 16-mixed": SCRIPT, "ddp 16-mixed": SCRIPT},
    "SamWithClosure": {"one 16-mixed": CLOSURE, "ddp 16-mixed": CLOSURE, "fsdp 16-mixed": CLOSURE},
    "FunctionalGradients": {"ddp 16-mixed": UNSCALED},
    "PerSampleGradients": {"ddp 16-mixed": UNSCALED},
    "WritesGradients": {"ddp 16-mixed": UNSCALED},
    "UnevenMicroBatches": {"fsdp": SKIPS},
    "BestWeights": {"fsdp": SKIPS},
    "TopOneMixture": {"fsdp": SKIPS},
    "BalancedRouter": {"fsdp": SKIPS},
    "EmaOfStateDict": {"fsdp": WHOLE_COPIES},
    "LookaheadKeyedByAddress": {"fsdp": WRAPPERS},
    "Lookahead": {"fsdp": WRAPPERS},
    "ClippedByHand": {"fsdp": SUMMED},
    "ScalarParameter": {"fsdp": SCALARS},
    "Clip": {"fsdp": SCALARS},
}
"""By class, then by the beginning of a mode (``ddp``, ``fsdp 16-mixed``)."""

ENDS_THE_PROCESS = {
    "UnevenMicroBatches": "fsdp",
    "BestWeights": "fsdp",
    "TopOneMixture": "fsdp",
    "BalancedRouter": "fsdp",
    "ExpertPerRank": "fsdp",
}
"""Classes that, under this strategy, may take the process with them or wait for a timeout; not run in CI there."""


def cause(name: str, mode: str) -> str | None:
    """Why a cell is wrong, where that is known."""
    return next((why for start, why in WRONG.get(name, {}).items() if mode.startswith(start)), None)
