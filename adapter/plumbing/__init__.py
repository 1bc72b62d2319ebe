"""Tools that know no run: files, locks, HTTP, settings, texts, and the report of a failure.

`durable.py`, `safe_open.py` and `file_lock.py` write, open and lock files. `http.py`, `urls.py` and `retry.py` are for
transfers. `redaction.py` and `log_redaction.py` keep secrets out of texts and logs. `settings.py` derives keys from
declarations, and `failures.py` turns an exception into a report. `devices.py` and `generators.py` handle accelerators
and random numbers; only they load torch. `text.py`, `threads.py`, `imports.py` and `counted_dict.py` are small helpers.

This package may import only the contract; every other package but the contract may import it.
"""
