"""Training on two devices, a rank each."""

from __future__ import annotations

from device.runs import CountWaits, Penalised, fit, standard_callbacks


def _no_step_waits(kind, folder):
    counted = CountWaits(9, 22)  # replicas are compared after step 16
    fit(Penalised(), kind, steps=24, callbacks=[counted, *standard_callbacks(folder)])
    assert not counted.found, "\n".join(map(str, counted.found))


def check_no_step_of_ddp_waits_for_the_device(folder):
    _no_step_waits("ddp", folder)


def check_no_step_of_one_bucket_waits_for_the_device(folder):
    _no_step_waits("ddp of one bucket", folder)


def check_no_step_of_fsdp_waits_for_the_device(folder):
    _no_step_waits("fsdp", folder)
