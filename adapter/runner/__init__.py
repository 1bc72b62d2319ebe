"""``python -m genlight.adapter.runner``: calls one function inside a scheduler's job, and reports the outcome.

It reads its environment and the files that its submitter wrote, and never talks to the scheduler. It calls callbacks
whose ``requires_runner_transport`` is true. A callback may have the methods ``on_begin_run_job_ctx``,
``on_end_run_job_ctx`` and ``on_completed_ctx``, each of which takes the context of that name in `contexts`. May import
cluster and plumbing.
"""
