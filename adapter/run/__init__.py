"""One attempt of a job: locks, inputs, resume, the Lightning training, its outcome and its one terminal event.

May import everything but the command line.
"""
