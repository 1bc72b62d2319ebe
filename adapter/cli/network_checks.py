"""What ``genlight doctor`` asks of the network: whether the servers answer, and whether inputs may be fetched.

Apart from the other checks, which need neither threads nor an HTTP client.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import httpx2

from ..contract.exceptions import InputError, StartupContractError
from ..inputs.http import probe
from ..inputs.huggingface import probe_hub
from ..inputs.local import checked_ref
from ..inputs.materialize import named_inputs
from ..inputs.private_addresses import AddressGuard
from ..inputs.refs import CozyRef, HttpRef, HubRef, Kind, LocalRef, Ref
from ..inputs.tensorhub import HttpResolveClient
from ..job.config import RunConfig
from ..job.spec import UPLOAD_URLS
from ..plumbing.finding import Finding, Level
from ..plumbing.http import build_client, failure_text
from ..plumbing.retry import RetryPolicy
from ..plumbing.threads import DaemonThreads
from ..plumbing.urls import safe_url

__all__ = ["ask_network"]

CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 2.5
MOST_AT_ONCE = 16
ONCE = RetryPolicy(attempts=1)


class Question(NamedTuple):
    """Something to ask, in a thread of its own."""

    subject: str
    label: str
    ask: Callable[[], str]
    """Returns what is well; raises `InputError` for what is not."""
    if_not: Level = "fail"
    """What it means that it is not well: a run starts without its upload targets, and not without its inputs."""


def ask_network(config: RunConfig, deadline: float) -> Iterator[Finding]:
    """Ask everything at once, in threads; gives the answers in order, once they are asked for.

    Args:
        config: The job. Its token goes to its `token_origins` alone.
        deadline: When to stop waiting, as ``time.monotonic`` counts; what has not answered by then is a fault.
    """
    # A look-up of a name cannot be given a time limit, and must not keep the doctor waiting: hence daemon threads.
    threads, clients = DaemonThreads(MOST_AT_ONCE, "genlight-doctor"), contextlib.ExitStack()
    try:
        questions = [*_destinations(config, clients), *_inputs(config, clients)]
    except StartupContractError as problem:  # of the environment's proxies
        clients.close()
        return iter([Finding("network", "fail", str(problem))])
    asked = [each if isinstance(each, Finding) else (each, threads.submit(each.ask)) for each in questions]
    return _answers(asked, deadline, clients)


def _answers(
    asked: list[Finding | tuple[Question, Future[str]]], deadline: float, clients: contextlib.ExitStack
) -> Iterator[Finding]:
    with clients:
        for each in asked:
            yield each if isinstance(each, Finding) else _answer(*each, deadline)


def _answer(question: Question, future: Future[str], deadline: float) -> Finding:
    try:
        return Finding(question.subject, "pass", future.result(timeout=max(0.0, deadline - time.monotonic())))
    except TimeoutError:
        text = f"{question.label} did not answer in time"
    except InputError as fault:
        text = str(fault) if question.label in str(fault) else f"{question.label}: {fault}"
    except Exception as error:  # noqa: BLE001 -- the fault of one check must not hide the others' results
        text = f"{question.label}: {failure_text(error)}"
    return Finding(question.subject, question.if_not, text)


def _destinations(config: RunConfig, clients: contextlib.ExitStack) -> Iterator[Question]:
    """Any answer will do, to a question without credentials: what is said to one without content means little."""
    client = _client(None, frozenset(), clients)
    urls = {f"uploads.{name}": getattr(config.uploads, name) for name in UPLOAD_URLS}
    for name, url in {**urls, "file_store_url": config.file_store_url}.items():
        if url is not None:
            yield Question(name, safe_url(url), partial(_head, client, url), "warn")


def _head(client: httpx2.Client, url: str) -> str:
    try:
        status = client.head(url).status_code
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise InputError(
            f"{safe_url(url)} cannot be reached: {failure_text(error)}; the run starts all the same"
        ) from None
    return f"{safe_url(url)} answers (status {status} to HEAD)"


def _inputs(config: RunConfig, clients: contextlib.ExitStack) -> Iterator[Question | Finding]:
    client = _client(config.capability_token, config.token_origins, clients)
    if config.private_hosts is not None:
        AddressGuard(config.private_hosts).attach(client)
    for kind, text in named_inputs(config):
        try:
            ref = checked_ref(kind, text)
        except InputError as fault:
            yield Finding("input", "fail", str(fault))
            continue
        if isinstance(ref, LocalRef):
            yield Finding("input", "pass", f"{ref.label} is here")
        else:
            yield Question("input", ref.label, partial(_may_be_fetched, kind, ref, client, config.file_store_url))


def _client(token: str | None, origins: frozenset[str], clients: contextlib.ExitStack) -> httpx2.Client:
    return clients.enter_context(
        build_client(
            token,
            origins,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            timeout_s=ANSWER_TIMEOUT_S,
            max_connections=MOST_AT_ONCE,
        )
    )


def _may_be_fetched(kind: Kind, ref: Ref, client: httpx2.Client, file_store_url: str | None) -> str:
    if isinstance(ref, HttpRef):
        probe(ref.url, client)
    elif isinstance(ref, HubRef):
        repository: Literal["model", "dataset"] = "dataset" if kind == "dataset" else "model"
        probe_hub(ref, repository, ANSWER_TIMEOUT_S)
    elif isinstance(ref, CozyRef):
        if file_store_url is None:
            raise InputError(f"{ref.label} needs a tensor hub. Set `TENSORHUB_URL`.")
        with tempfile.TemporaryDirectory(prefix="genlight-doctor-") as folder:
            resolver = HttpResolveClient(file_store_url, client, Path(folder), ONCE)
            resolver.manifest(resolver.resolve(ref=ref.label))
    return f"{ref.label} may be fetched"
