"""A job: its file, the environment and ``--set`` become one frozen `RunConfig`, and that becomes Lightning objects.

The feed declares its own options and the uploads their settings; a job's `dataset` and `uploads` inherit them.
Reading a job does not load torch.
"""
