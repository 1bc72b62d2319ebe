"""The witness of a run: a record of what each rank trained. A restarted run repeats steps, and compares them with it.

`entry` has the entries, their file and their comparison, and needs neither torch nor Lightning; `recording` takes the
digests of a step; `witness` keeps the file while a run trains, and compares the steps that a resumed run repeats;
`state` has the values of a checkpoint by path, and compares a repeated step with a checkpoint that was saved after it.

May import `hook`, `checkpoint` and everything below `callbacks`. `checkpoint/policy.py` owns the witness.
"""
