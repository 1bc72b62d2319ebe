"""A job: its file, the environment and ``--set`` become one frozen `RunConfig`, and that becomes Lightning objects.

`spec.py` declares the settings. `sources.py` merges them, and `config.py` makes the `RunConfig`. `identity.py` makes a
digest of the job, `standard_callbacks.py` chooses its callbacks, and `lightning_objects.py` makes the Lightning
objects; `parser_errors.py` shortens the errors. The feed and the uploads declare their own settings
(`adapter/feed/options.py`, `reporters/uploads/config.py`), which the blocks `dataset` and `uploads` of a job take over.

Only `lightning_objects.py` loads torch. This package may import the feed and everything below it.
"""
