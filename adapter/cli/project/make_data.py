"""Write rows.parquet: 1,000 points (a, b) and y = sin(3a) * b. Replace it with your own data."""

import math
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

draw = random.Random(0)
points = [(draw.uniform(-1, 1), draw.uniform(-1, 1)) for _ in range(1000)]
columns = {
    "a": [a for a, _ in points],
    "b": [b for _, b in points],
    "y": [math.sin(3 * a) * b for a, b in points],
}
schema = pa.schema([(name, pa.float32()) for name in columns])
pq.write_table(pa.table(columns, schema=schema), Path(__file__).with_name("rows.parquet"))
