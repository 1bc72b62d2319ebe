"""Rehearse a bad night with a job of the user: ``genlight prove``.

`faults` is loaded by the processes that train and breaks them; `rehearsal` starts them in a scratch folder; `evidence`
reads and compares their results; `prove` is the list of rehearsals and the certificate. The folder may import
everything that a command may, except commands.
"""
