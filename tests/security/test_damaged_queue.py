"""A queue in which one byte is wrong is repaired, or refused with the name of the file; never anything else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from genlight.adapter.contract.exceptions import StartupContractError, UploadError
from genlight.reporters.uploads import UploadConfig, Uploader
from genlight.reporters.uploads.queue import ABOUT, Queue, Receipt, pack

URL = "http://127.0.0.1:9"


def open_uploader(folder):
    config = UploadConfig("r", folder / "uploads", terminal_url=f"{URL}/t", checkpoint_url=f"{URL}/c")
    return Uploader(config, keep_terminal=True)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run's folder with an upload of each kind, and the bytes of its entries and description."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "a.json").write_text("{}")
    open_uploader(folder).close()
    queue = Queue(folder / "uploads")
    queue.add("checkpoint", 1, pack(folder, folder / "a.json", [folder / "a.json"]))
    queue.add("metrics", 1, {"payload": {"metrics": {"a": 1.0}}, "key": "k"})
    queue.add("terminal", 1, {"payload": {"status": "failed", "step": 1}, "key": "k"})
    queue.add_receipt(Receipt("checkpoint:b", "c", None, "s", 2))
    queue.close()
    return folder, {path.name: path.read_bytes() for path in (folder / "uploads").glob("*.json")}


@pytest.mark.parametrize("name", ["000000001.json", "000000002.json", "000000003.json", ABOUT])
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_byte_that_is_wrong(sound, name, place, byte, cut):
    folder, files = sound
    for other, data in files.items():
        (folder / "uploads" / other).write_bytes(data)
    data = files[name]
    place %= len(data)
    (folder / "uploads" / name).write_bytes(data[:place] + bytes([byte]) * (not cut) + data[place + 1 :])

    refusal = None
    try:
        open_uploader(folder).close()
    except (UploadError, StartupContractError) as error:
        refusal = str(error)
    if refusal is not None:
        assert str(folder / "uploads") in refusal
    else:
        places = [path for path in folder.glob("uploads*") if (path / ABOUT).exists()]
        assert "r" in {json.loads((path / ABOUT).read_bytes())["run_id"] for path in places}
