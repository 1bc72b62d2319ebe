"""Logs and warnings of a process show no secret, and logging never raises into the code that logs."""

import io
import logging
import threading
import warnings

import pytest
from hypothesis import given, strategies as st

from genlight.adapter.plumbing.log_redaction import redacted_logs

CANARY = "c4nary-0f-th3-l0g"
log = logging.getLogger("somebody.else")


class Unspeakable:
    def __str__(self):
        raise RuntimeError(CANARY)

    __repr__ = __str__


@pytest.fixture
def shown():
    """Everything that a handler writes which shows each field of a record, in JSON's manner."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    fields = logging.StreamHandler(stream)
    fields.format = lambda record: repr({name: value for name, value in vars(record).items() if name != "exc_info"})
    log.addHandler(handler)
    log.addHandler(fields)
    yield stream.getvalue
    log.removeHandler(handler)
    log.removeHandler(fields)


@pytest.mark.parametrize(
    "arguments",
    [
        ("value %d", "abc"),
        ("value %d of %s", "abc", CANARY),
        ("two %s %s", CANARY),
        ("%(missing)s", {"other": CANARY}),
        ("what %s", Unspeakable()),
        (Unspeakable(),),
        ("none", CANARY),
    ],
)
def test_a_malformed_call_neither_raises_nor_shows_a_secret(shown, arguments):
    with redacted_logs([CANARY], {}):
        log.warning(*arguments)

    assert "WARNING" in shown()
    assert CANARY not in shown()


def test_a_call_without_secrets_is_shown_complete(shown, caplog):
    with redacted_logs((), {}):
        log.warning("step %d", 3)
        log.warning("value %d", "abc")

    assert caplog.records[0].args == (3,)
    assert "WARNING value %d ('abc',) [TypeError]" in shown()


def test_tracebacks_are_redacted_for_formatters_that_make_their_own(shown):
    seen = []

    class Own(logging.Handler):
        def emit(self, record):
            seen.append(logging.Formatter().formatException(record.exc_info) if record.exc_info else record.exc_text)

    handler = Own()
    log.addHandler(handler)
    try:
        with redacted_logs([CANARY], {}):
            try:
                raise ValueError(CANARY)
            except ValueError:
                log.exception("it failed", stack_info=True)
    finally:
        log.removeHandler(handler)

    assert CANARY not in shown() + str(seen)
    assert "Traceback" in seen[0]


class Breaks:
    def __del__(self):
        raise ValueError(CANARY)


def test_exceptions_of_threads_and_destructors_reach_standard_error_without_the_secret(capsys):
    def fail():
        raise ValueError(CANARY)

    with redacted_logs([CANARY], {}):
        thread = threading.Thread(target=fail, name="worker")
        thread.start()
        thread.join()
        Breaks()

    said = capsys.readouterr().err
    assert CANARY not in said
    assert "Exception in thread worker:" in said
    assert said.count("ValueError: <hidden>") == 2


def test_all_is_as_before_afterwards():
    before = logging.Logger.handle, warnings.showwarning, threading.excepthook
    with redacted_logs([CANARY], {}):
        assert logging.Logger.handle is not before[0]

    assert before == (logging.Logger.handle, warnings.showwarning, threading.excepthook)


@given(
    st.text(max_size=30), st.lists(st.one_of(st.integers(), st.text(max_size=8), st.none(), st.floats()), max_size=3)
)
def test_no_call_of_any_library_raises(message, arguments):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    log.addHandler(handler)
    try:
        with redacted_logs([CANARY], {}):
            log.error(message, *arguments)
    finally:
        log.removeHandler(handler)
