"""What a trainer class, a job and the runtime say to each other: types, exceptions, run state, failures.

The vocabulary: it imports nothing of genlight, and everybody may import it.
"""
