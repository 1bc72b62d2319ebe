"""Training on one device."""

from __future__ import annotations

from device.runs import CountWaits, Penalised, Regression, fit, standard_callbacks


def check_no_step_waits_for_the_device(folder):
    counted = CountWaits(9, 15)
    fit(Penalised(), "one", steps=17, callbacks=[counted, *standard_callbacks(folder)])
    assert not counted.found, "\n".join(map(str, counted.found))


def check_a_step_of_16_mixed_waits_once_for_the_device(folder):
    """Whether the update may be made, as in torch's own scaler."""
    counted = CountWaits(9, 15)
    fit(Regression(), "one", steps=17, callbacks=[counted, *standard_callbacks(folder)], precision="16-mixed")
    assert len(counted.found) == 15 - 9, "\n".join(map(str, counted.found))
    assert all("may_update" in str(wait) for wait in counted.found)
