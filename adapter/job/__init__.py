"""A job: its spec, the environment and ``--set`` become one frozen `RunConfig`, and that a Lightning configuration.

Options of the feed and settings of uploads are declared by those, and a job's `dataset` and `uploads` have them.
Reading a job loads no torch.
"""
