"""A spool in which one byte is wrong is repaired, or refused with the name of the file; never anything else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from genlight.adapter.contract.exceptions import StartupContractError, UploadError
from genlight.reporters.uploads import UploadConfig
from genlight.reporters.uploads.artifact import pack
from genlight.reporters.uploads.journal import DESCRIPTION, JOURNAL
from genlight.reporters.uploads.spool import Spool, claim, look_through

URL = "http://127.0.0.1:9"


def config_of(folder):
    return UploadConfig("r", folder / "uploads", terminal_url=f"{URL}/t", checkpoint_url=f"{URL}/c")


def open_spool(folder):
    spool = Spool(folder / "uploads")
    try:
        claim(spool, config_of(folder), [])
        look_through(spool, config_of(folder), keep_terminal=True)
        return spool
    except BaseException:
        spool.close()
        raise


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run's folder with an upload of each kind, and the bytes of its journal and description."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "a.json").write_text("{}")
    spool = open_spool(folder)
    spool.add("checkpoint", 1, pack(folder, folder / "a.json", [folder / "a.json"]).body())
    spool.add("metrics", 1, {"metrics": {"a": 1.0}})
    spool.add("terminal", 1, {"payload": {"status": "failed", "step": 1}, "key": "k"})
    spool.add_receipt("checkpoint:b", {"content": "c", "ref": None, "sha256": "s", "size_bytes": 2})
    spool.close()
    return folder, {name: (folder / "uploads" / name).read_bytes() for name in (JOURNAL, DESCRIPTION)}


@pytest.mark.parametrize("name", [JOURNAL, DESCRIPTION])
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.booleans())
@settings(max_examples=150)
def test_a_byte_that_is_wrong(sound, name, place, byte, cut):
    folder, files = sound
    for other, data in files.items():
        (folder / "uploads" / other).write_bytes(data)
    data = files[name]
    place %= len(data)
    (folder / "uploads" / name).write_bytes(data[:place] + bytes([byte]) * (not cut) + data[place + 1 :])

    refusal = None
    try:
        open_spool(folder).close()
    except (UploadError, StartupContractError) as error:
        refusal = str(error)
    if refusal is not None:
        assert str(folder / "uploads") in refusal
    else:
        assert json.loads((folder / "uploads" / DESCRIPTION).read_bytes())["run_id"] == "r"
