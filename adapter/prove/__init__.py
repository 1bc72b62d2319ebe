"""Train a user's job again: rehearse a bad night (``genlight prove``), or replay its steps (``genlight replay``).

`faults` is loaded by the processes that train and breaks them; `rehearsal` starts them in a scratch folder; `evidence`
reads and compares their results; `prove` is the list of rehearsals and the certificate. `replay` trains steps of a run
again in this process; `step_view` reads one of them, and finds the rows that make it fail. The folder may import
everything that a command may, except commands.
"""
