"""The attempts of a job: locks, inputs, resume, the Lightning training, its outcome and its one terminal event.

`run.py` runs one attempt in a `Session` (`session.py`), and `restarts.py` starts further ones, on several nodes by
`nodes.py`. `start.py` chooses the checkpoint, after a look at earlier attempts (`attempts.py`, `deaths.py`);
`training.py` and `fit.py` train. `ranks.py` watches the other ranks, also by `rank_files.py`; `folder.py` locks the
run's folder; `control_plane.py` talks to an orchestrator; `report.py` and `proof.py` write messages and certificates.

May import `check` and everything below it.
"""
