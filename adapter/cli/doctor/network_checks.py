"""What ``genlight doctor`` asks of the network: whether the servers answer, and whether inputs may be fetched."""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import httpx2

from ...contract.exceptions import InputError
from ...inputs.http import probe
from ...inputs.huggingface import probe_hub
from ...inputs.local import checked_ref
from ...inputs.private_addresses import AddressGuard
from ...inputs.tensorhub import HttpResolveClient
from ...job.refs import CozyRef, HttpRef, HubRef, Kind, LocalRef, Ref
from ...job.spec import InputsSpec
from ...plumbing.finding import Finding, Level
from ...plumbing.http import build_client, failure_text
from ...plumbing.retry import RetryPolicy
from ...plumbing.threads import started
from ...plumbing.urls import safe_url

__all__ = ["NetworkChecks"]

CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 2.5
ONCE = RetryPolicy(attempts=1)


@dataclass(frozen=True)
class Question:
    """Something to ask, in a thread of its own."""

    subject: str
    label: str
    ask: Callable[[], str]
    """Returns what is well; raises `InputError` for what is not."""
    if_not: Level = "fail"
    """What it means that it is not well: a run starts without its upload targets, and not without its inputs."""


class NetworkChecks:
    """Asks everything at once in threads, while the caller looks at the machine.

    Args:
        urls: Destinations by name; any answer will do.
        inputs: References whose servers are asked for them.
        token: Shown to `token_origins` alone.
        token_origins: Origins that may have the token.
        file_store_url: The tensor hub of ``cozy:`` references.
        private_hosts: What references may reach in spite of a private address; None for everything.
    """

    def __init__(
        self,
        *,
        urls: Mapping[str, str],
        inputs: InputsSpec,
        token: str | None,
        token_origins: frozenset[str],
        file_store_url: str | None,
        private_hosts: tuple[str, ...] | None = None,
    ) -> None:
        self._client = build_client(
            token,
            token_origins,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            timeout_s=ANSWER_TIMEOUT_S,
            max_connections=16,
        )
        if private_hosts is not None:
            AddressGuard(private_hosts).attach(self._client)
        self._plain_client = build_client(
            None, (), connect_timeout_s=CONNECT_TIMEOUT_S, timeout_s=ANSWER_TIMEOUT_S, max_connections=16
        )
        self._file_store_url = file_store_url
        self._known: list[Finding] = []
        self._questions = [
            Question(name, safe_url(url), partial(self._answers, url), "warn") for name, url in urls.items()
        ]
        self._questions += self._input_questions(inputs)
        self._results: queue.SimpleQueue[tuple[Question, Finding]] = queue.SimpleQueue()
        for question in self._questions:
            # Daemon threads: a look-up of a name cannot be given a time limit, and must not keep the doctor waiting.
            started(threading.Thread(target=self._run, args=(question,), name="genlight-doctor", daemon=True))

    def findings(self, deadline: float) -> Iterator[Finding]:
        """All answers, in the order of the questions; no answer by `deadline` (of ``time.monotonic``) is a fault."""
        answers: dict[int, Finding] = {}
        while len(answers) < len(self._questions):
            try:
                question, finding = self._results.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            answers[id(question)] = finding
        for client in (self._client, self._plain_client):
            client.close()
        yield from self._known
        for question in self._questions:
            silent = Finding(question.subject, question.if_not, f"{question.label} did not answer in time")
            yield answers.get(id(question), silent)

    def _run(self, question: Question) -> None:
        try:
            finding = Finding(question.subject, "pass", question.ask())
        except InputError as fault:
            named = question.label in str(fault)
            finding = Finding(question.subject, question.if_not, str(fault) if named else f"{question.label}: {fault}")
        except Exception as error:  # noqa: BLE001 -- the fault of one check must not hide the others' results
            finding = Finding(question.subject, question.if_not, f"{question.label}: {failure_text(error)}")
        self._results.put((question, finding))

    def _answers(self, url: str) -> str:
        """Ask a destination without credentials; what it answers to a question without content means little."""
        try:
            status = self._plain_client.head(url).status_code
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise InputError(
                f"{safe_url(url)} cannot be reached: {failure_text(error)}; the run starts all the same"
            ) from None
        return f"{safe_url(url)} answers (status {status} to HEAD)"

    def _input_questions(self, inputs: InputsSpec) -> Iterator[Question]:
        named: list[tuple[Kind, str | None]] = [("model", inputs.base_model_ref)]
        named += [("dataset", ref) for ref in inputs.dataset_parquet_refs]
        named += [("checkpoint", inputs.resume_checkpoint_ref)]
        for kind, text in named:
            if text is None:
                continue
            try:
                ref = checked_ref(kind, text)
            except InputError as fault:
                self._known.append(Finding("input", "fail", str(fault)))
                continue
            if isinstance(ref, LocalRef):
                self._known.append(Finding("input", "pass", f"{ref.label} is here"))
            else:
                yield Question("input", ref.label, partial(self._input_is_there, kind, ref))

    def _input_is_there(self, kind: Kind, ref: Ref) -> str:
        if isinstance(ref, HttpRef):
            probe(ref.url, self._client)
        elif isinstance(ref, HubRef):
            repository: Literal["model", "dataset"] = "dataset" if kind == "dataset" else "model"
            probe_hub(ref, repository, ANSWER_TIMEOUT_S)
        elif isinstance(ref, CozyRef):
            self._resolve(ref)
        return f"{ref.label} may be fetched"

    def _resolve(self, ref: CozyRef) -> None:
        if self._file_store_url is None:
            raise InputError(f"{ref.label} needs a tensor hub. Set `TENSORHUB_URL`.")
        with tempfile.TemporaryDirectory(prefix="genlight-doctor-") as folder:
            resolver = HttpResolveClient(self._file_store_url, self._client, Path(folder), ONCE)
            resolver.manifest(resolver.resolve(ref=ref.label))
