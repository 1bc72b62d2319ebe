"""Status of a Kubeflow TrainJob: progress, time left and metrics, sent to the controller of Kubeflow Trainer."""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from ..adapter.plumbing.http import build_client, failure_text
from ..adapter.plumbing.safe_open import read_regular
from ..adapter.plumbing.threads import started
from ..adapter.plumbing.urls import safe_url, trusted_origins
from ..reporters.events.event_logger import last_step
from .hook.cadence import NEVER, next_multiple, positive
from .hook.events import hosted_by, numbers_of, run_state_of, step_metrics
from .hook.hook import Hook, skippable

log = logging.getLogger(__name__)

URL_VARIABLE = "KUBEFLOW_TRAINER_SERVER_URL"
"""Address for the status. The controller sets it in the pods of a TrainJob if its feature gate ``TrainJobStatus``
is on."""
TOKEN_VARIABLE = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105 - the name of a variable
"""Path of the file with the token, which Kubernetes replaces from time to time."""
CA_VARIABLE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
"""Path of the certificate of the authority that signed the server's certificate. If it is not set, the
authorities of the system count."""
MOST_METRICS = 256
"""Maximum number of metrics that the server accepts."""
LARGEST_TOKEN = 1 << 16
TIMEOUT_S = 5.0
"""Maximum seconds of silence in one request, and of the wait for the last status at the end of training."""


class TrainJobStatus(Hook):
    """Sends progress, remaining seconds and metrics to Kubeflow Trainer, which shows them as status of the TrainJob.

    It makes a status every ``log_every_n_steps`` of the trainer (`metric_every` of a job), on rank zero. A thread sends
    the newest status, so that no step waits for the server. If the server does not answer, one warning is logged, and
    the thread tries again until there is a newer status. The end of training waits at most 5 s for the last status.

    Without the variable ``KUBEFLOW_TRAINER_SERVER_URL`` it does nothing. ``genlight run`` adds this callback if the
    variable is set.

    Args:
        every_s: Seconds between two requests.

    Raises:
        ValueError: `every_s` is not positive.
    """

    optional_reads = ("eval_scores", "loss_stats")
    _of_this_process = frozenset({"_sender"})
    _sender: _Sender | None = None

    def __init__(self, every_s: float = 5.0) -> None:
        self.every_s = positive("every_s", every_s)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        url = os.environ.get(URL_VARIABLE)
        self._sender = _Sender(url, self.every_s) if url else None
        self._began: tuple[int, float] | None = None
        """Step and time of the first status. Time left is computed from there, because the first steps take longer."""

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # Lightning sets it without declaring it
        self.next_due_step = NEVER if self._sender is None else next_multiple(step, every)
        if self._sender is not None and every and step % every == 0:
            self._sender.offer(self._status(trainer, pl_module))

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = None

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._sender is not None:
            ended = {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
            self._sender.offer({**self._status(trainer, pl_module), **ended})
            self._sender.close()

    @override
    def on_training_failed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._sender is not None:  # the last status stays as it is: the run may be continued
            self._sender.close()

    def _status(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return the status of this moment in the form that the server expects."""
        step, now, last = trainer.global_step, time.monotonic(), last_step(trainer)
        first, began_s = self._began = self._began or (step, now)
        state = run_state_of(trainer)
        read = state.loss_stats if hosted_by(pl_module) is not None else step_metrics(trainer, pl_module)
        metrics: dict[str, Any] = {**(read or {}), **numbers_of(state.eval_scores), "current_step": step}
        status: dict[str, Any] = {"lastUpdatedTime": datetime.now(UTC).isoformat()}
        if last:
            metrics["total_steps"] = last
            status["progressPercentage"] = min(100 * step // last, 99)  # 100 means that training has ended
            if step > first:
                status["estimatedRemainingSeconds"] = round((last - step) * (now - began_s) / (step - first))
        named = [{"name": name, "value": str(value)} for name, value in metrics.items()]
        return {**status, "metrics": named[-MOST_METRICS:]}


class _Sender:
    """Sends the newest status from a thread; a newer status replaces one that was not sent yet.

    Args:
        url: Address of the server.
        every_s: Seconds between two requests.
    """

    def __init__(self, url: str, every_s: float) -> None:
        self._url, self._every_s = url, every_s
        self._offered: deque[dict[str, Any]] = deque(maxlen=1)
        self._is_closed = threading.Event()
        self._is_failing = False
        self._thread = started(threading.Thread(target=self._run, name="genlight-train-job", daemon=True))

    def offer(self, status: dict[str, Any]) -> None:
        """Send `status` with the next request."""
        self._offered.append(status)

    def close(self) -> None:
        """Send the last offered status, and wait at most `TIMEOUT_S` for that."""
        self._is_closed.set()
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        """Send the newest status every `every_s` seconds until the sender is closed."""
        status: dict[str, Any] | None = None
        while True:
            is_last = self._is_closed.wait(self._every_s)
            status = self._offered.pop() if self._offered else status
            if status is not None and self._sent(status):
                status = None  # otherwise it is sent again, until there is a newer one
            if is_last:
                return

    def _sent(self, status: dict[str, Any]) -> bool:
        """Send a status; return whether the server has accepted it."""
        token, authority = os.environ.get(TOKEN_VARIABLE), os.environ.get(CA_VARIABLE)
        fault = ""
        try:
            secret = None if token is None else read_regular(token, limit=LARGEST_TOKEN).decode("ascii").strip()
            verify = ssl.create_default_context(cafile=authority) if authority else True
            with build_client(secret, trusted_origins([self._url]), timeout_s=TIMEOUT_S, verify=verify) as client:
                answer = client.post(self._url, json={"trainerStatus": status})
            if not answer.is_success:
                fault = f"it answers with {answer.status_code}"
        except Exception as error:  # noqa: BLE001  # no failure of a report may reach the run
            fault = failure_text(error)  # not `str(error)`: that may hold the token
        if fault and not self._is_failing:
            text = "the status of this TrainJob cannot be sent to %s (%s); still trying"
            log.warning(text, safe_url(self._url), fault)
        self._is_failing = bool(fault)
        return not fault
