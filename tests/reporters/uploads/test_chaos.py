"""Many uploads through a network that fails at every third request, with the client killed on the way."""

import hashlib
import random
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc

import pytest

from genlight.reporters.uploads import UploadConfig, Uploader

CLIENT = textwrap.dedent(
    """
    import json, logging, sys
    from pathlib import Path
    from genlight.adapter.plumbing.retry import RetryPolicy
    from genlight.reporters.uploads import UploadConfig, Uploader, uploader as uploader_module

    uploader_module.RETRIES = RetryPolicy(1_000_000, first_delay_s=0.002, longest_delay_s=0.02)
    logging.disable(logging.CRITICAL)
    url, run, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    config = UploadConfig(
        run_id="run-1", owner="me", token="t", queue_dir=run / "uploads", sample_url=url + "/sample",
        checkpoint_url=url + "/checkpoint", file_store_url=url, timeout_s=0.25,
    )
    done = run / "queued"
    uploader = Uploader(config)
    uploader.start()
    queued = int(done.read_text()) if done.exists() else 0
    for step in range(queued, count):  # a resumed run may queue its last step once more
        path = run / "files" / f"{step}.bin"
        if step % 2:
            uploader.enqueue("checkpoint", path, step=step)
        else:
            uploader.enqueue("sample", path, step=step)
        fresh = run / "queued.new"
        fresh.write_text(str(step + 1))
        fresh.replace(done)
    result = uploader.settle(150)
    uploader.close()
    sys.exit(0 if result is None else 9)
    """
)


def _write_files(run, count, dice):
    (run / "files").mkdir(parents=True)
    for step in range(count):
        size = dice.choice([0, 1, 100, 5_000, 70_000, 300_000])
        (run / "files" / f"{step}.bin").write_bytes(dice.randbytes(size))


def _assert_all_there_once(chaos, run, count):
    expected = {f"step-{step:08d}-{step}.bin": (run / "files" / f"{step}.bin").read_bytes() for step in range(count)}
    assert chaos.files() == expected
    applied = chaos.state["applied"]
    assert len({item["key"] for item in applied}) == len(applied)
    files = [item["file"] for item in applied if "file" in item]
    assert len(files) == len(set(files)) == count
    for path, parity in (("/sample", 0), ("/checkpoint", 1)):
        messages = chaos.messages(path)
        assert [message["step"] for message in messages] == list(range(parity, count, 2))
        for message in messages:
            digest = hashlib.sha256((run / "files" / f"{message['step']}.bin").read_bytes()).hexdigest()
            assert message["sha256"] == digest


def _client(chaos, run, count):
    return subprocess.Popen([sys.executable, "-c", CLIENT, chaos.url, str(run), str(count)])


@pytest.mark.slow
def test_500_uploads_all_arrive_once_and_byte_identical_though_the_client_is_killed_ten_times(chaos, tmp_path):
    run, count = tmp_path / "run", 500
    _write_files(run, count, random.Random(2))
    chaos.control(rate=0.3, faults="all", seed=5)
    killed = 0
    for part in range(1, 11):
        chaos.control(hold_at=part * 90 + 40)  # else a kill that comes late would find the client gone
        client = _client(chaos, run, count)
        while client.poll() is None and chaos.count < part * 90:
            time.sleep(0.02)
        if client.poll() is None:
            client.send_signal(signal.SIGKILL)
            killed += 1
        client.wait()
    assert killed == 10
    chaos.control(hold_at=None)
    assert _client(chaos, run, count).wait(200) == 0
    _assert_all_there_once(chaos, run, count)


def test_memory_stays_flat_while_large_files_are_sent(chaos, tmp_path):
    big = tmp_path / "run" / "big.bin"
    big.parent.mkdir()
    big.write_bytes(bytes(24 << 20))
    config = UploadConfig(
        run_id="r", owner="me", token="t", queue_dir=tmp_path / "run" / "uploads", file_store_url=chaos.url
    )
    with Uploader(config) as uploader:
        tracemalloc.start()
        try:
            uploader.enqueue("checkpoint", big, step=1)
            assert uploader.settle(120) is None
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert chaos.files()["step-00000001-big.bin"] == big.read_bytes()
    assert peak < 4 << 20
