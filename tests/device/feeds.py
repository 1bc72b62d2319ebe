"""The copies of a feed's batches to the device."""

import pyarrow as pa
import torch

from genlight.adapter import ArrowFeed
from support.device import waits

ROWS = 23
TABLE = pa.table({"x": pa.array(range(ROWS), pa.float32()), "text": ["row"] * ROWS})


def _sum_batches(feed: ArrowFeed) -> tuple[list[float], list]:
    """Return the sums of all batches, computed on the device, and the waits during that."""
    with waits() as found:
        sums = [batch["x"].to("sim", non_blocking=True).double().sum() for batch in feed]
    return [float(each.cpu()) for each in sums], found


def _expected(batch_size: int) -> list[float]:
    return [float(sum(range(at, min(at + batch_size, ROWS)))) for at in range(0, ROWS, batch_size)]


def check_tensors_are_pinned_by_default_and_nothing_waits_for_their_copies(folder):
    sums, found = _sum_batches(ArrowFeed(TABLE, batch_size=4, epochs=1, collate="torch"))
    assert sums == _expected(4)
    assert not found, "\n".join(map(str, found))


def check_each_copy_from_memory_that_is_not_pinned_waits(folder):
    sums, found = _sum_batches(ArrowFeed(TABLE, batch_size=4, epochs=1, collate="torch", pin_memory=False))
    assert sums == _expected(4)
    assert len(found) == len(sums)


def check_a_batch_of_another_collate_is_pinned_too(folder):
    feed = ArrowFeed(TABLE, batch_size=4, epochs=1, collate=lambda batch: [torch.from_numpy(batch["x"].to_numpy())])
    assert all(batch[0].is_pinned() for batch in feed)
