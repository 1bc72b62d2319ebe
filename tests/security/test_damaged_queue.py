"""A queue in which one byte is wrong is repaired, or refused with the name of the file; never anything else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from genlight.adapter.contract.exceptions import StartupContractError, UploadError
from genlight.reporters.uploads import UploadConfig, Uploader
from genlight.reporters.uploads.queue import DELIVERED, Entry, Queue, pack, read_entries

pytestmark = pytest.mark.promise(name="security")

URL = "http://127.0.0.1:9"


def open_uploader(folder):
    config = UploadConfig("r", folder / "uploads", terminal_url=f"{URL}/t", checkpoint_url=f"{URL}/c")
    return Uploader(config, keep_terminal=True)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run's folder with an upload of each kind, and the bytes of its entries, delivered ones too."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "a.json").write_text("{}")
    queue = Queue(folder / "uploads")
    common = {"run_id": "r", "step": 1, "to": ("endpoint",)}
    for kind in ("checkpoint", "checkpoint"):
        queue.add(Entry(kind=kind, local_path="a.json", files=pack(folder, folder / "a.json", []), **common))
    queue.add(Entry(kind="metrics", payload={"metrics": {"a": 1.0}}, key="k", **common))
    queue.add(Entry(kind="terminal", payload={"status": "failed", "step": 1}, key="k", **common))
    queue.finish(queue.entries()[0])
    queue.close()
    return folder, {
        path: path.read_bytes() for path in (folder / "uploads").rglob("*.json") if "links" not in path.parts
    }


@pytest.mark.parametrize("name", [f"{DELIVERED}/000000001.json", "000000002.json", "000000003.json", "000000004.json"])
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_byte_that_is_wrong(sound, name, place, byte, cut):
    folder, files = sound
    for path in (folder / "uploads").rglob("0*.json"):
        path.unlink()
    for path, data in files.items():
        path.write_bytes(data)
    damaged = folder / "uploads" / name
    data = files[damaged]
    place %= len(data)
    damaged.write_bytes(data[:place] + bytes([byte]) * (not cut) + data[place + 1 :])

    refusal = None
    try:
        open_uploader(folder).close()
    except (UploadError, StartupContractError) as error:
        refusal = str(error)
    if refusal is not None:
        assert str(damaged) in refusal
    else:
        assert {entry.kind for entry in read_entries(folder / "uploads")} <= {"checkpoint", "metrics", "terminal"}
