"""Train a user's job or run again, for ``genlight prove``, ``replay`` and ``bisect``.

``genlight prove`` rehearses kills, stops and broken files: `faults` runs in the processes that train, and breaks them;
`rehearsal` starts these processes in a scratch folder; `evidence` reads and compares their results; `prove` has the
list of rehearsals, and judges each. The other two commands train steps of a run again, with `repetition`: `replay`
shows one step, and finds the rows that make it fail; `bisect` finds the first difference of two runs. The folder may
import everything that a command may, except commands.
"""
