"""Changes to the witness of a run that has ended."""

import msgspec

from genlight.callbacks.witness.entry import WitnessFile, file_of_rank, read_witness


def change_witness(folder, **facts):
    """Write the witness of a run again, with other facts about its attempts."""
    path = file_of_rank(folder / "checkpoints", 0)
    recorded = read_witness(path)
    attempts = {number: {**known, **facts} for number, known in recorded.header.attempts.items()}
    WitnessFile(path, msgspec.structs.replace(recorded.header, attempts=attempts), recorded.entries).close()
