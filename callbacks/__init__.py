"""Runtime concerns of a training job as Lightning callbacks."""
