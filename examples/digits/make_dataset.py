"""Writes digits.parquet, the data of this example, from scikit-learn's copy of the UCI handwritten digits.

Run ``python make_dataset.py [TARGET]``. The result depends only on the versions of pyarrow and scikit-learn.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_digits

PIXELS = 64
ROWS_PER_GROUP = 400  # five row groups, so that several processes each have some to read


def digits_table() -> pa.Table:
    """All 1,797 digits: `image` holds 64 grey values from 0 to 16 in row order, `label` the digit."""
    digits = load_digits()
    grey = pa.array(digits.data.astype(np.uint8).reshape(-1))
    schema = pa.schema([("image", pa.list_(pa.uint8(), PIXELS)), ("label", pa.int64())])
    columns = [pa.FixedSizeListArray.from_arrays(grey, PIXELS), pa.array(digits.target.astype(np.int64))]
    return pa.Table.from_arrays(columns, schema=schema)


def write_dataset(target: Path) -> None:
    """Write the table to `target`, compressed."""
    pq.write_table(digits_table(), target, row_group_size=ROWS_PER_GROUP, compression="zstd")


if __name__ == "__main__":
    write_dataset(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("digits.parquet"))
