"""Writes `train.bin` and `val.bin`: a token for each byte of the manual that Python itself holds."""

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

FOLDER = Path(__file__).parent

text = "\n".join(topics.values()).encode("ascii", errors="ignore")
tokens = np.frombuffer(text, dtype=np.uint8).astype(np.uint16)  # uint16, as for the tokens of GPT-2
cut = len(tokens) * 9 // 10
tokens[:cut].tofile(FOLDER / "train.bin")
tokens[cut:].tofile(FOLDER / "val.bin")
print(f"{cut:,} tokens to train on, {len(tokens) - cut:,} to evaluate")
