"""Train a user's job or run again, for ``genlight prove``, ``replay`` and ``bisect``.

Prove rehearses a bad night: `faults` runs in the processes that train, and breaks them; `rehearsal` starts them in a
scratch folder; `evidence` reads and compares their results; `prove` has the list of rehearsals, and judges each.
`repetition` trains steps of a run again in this process: `replay` shows one of them, and finds the rows that make it
fail; `bisect` finds the first difference of two runs. The folder may import everything that a command may,
except commands.
"""
