"""Secrets do not get into the log, whoever logs them."""

from __future__ import annotations

import logging

from genlight.adapter.plumbing.log_redaction import redacted_logs

log = logging.getLogger("somebody.else")
ENVIRON = {"API_KEY": "s3cret-key", "LONG": "x" * 20, "PWD": "/a/path/that/is/long", "LANG": "en_US.UTF-8", "KEY": "ab"}


def test_every_record_is_made_without_secrets_and_afterwards_as_before(caplog):
    factory = logging.getLogRecordFactory()
    with redacted_logs(("my-token",), ENVIRON):
        log.warning("sent %s to %s", "my-token", "http://a:b@host/")
        try:
            raise ValueError("refused: my-token")
        except ValueError:
            log.exception("it %s", "failed")

    assert "my-token" not in caplog.text
    assert "refused: <hidden>" in caplog.text
    assert "Traceback" in caplog.text
    assert "it failed" in caplog.text
    assert logging.getLogRecordFactory() is factory


def test_a_record_without_secrets_keeps_its_arguments(caplog):
    with redacted_logs((), {}):
        log.warning("step %d", 3)

    assert caplog.records[0].args == (3,)
