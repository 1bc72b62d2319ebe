"""What rank zero leaves of its end, and how another rank waits for it."""

import threading
import time

from genlight.adapter.run.ranks.rank_zero_exit import (
    FILE,
    exit_code_of_rank_zero,
    forget_exit_code,
    leave_exit_code,
    wait_for_rank_zero,
)


def wait(folder, *, gone, within_s=60.0):
    return wait_for_rank_zero(folder, is_gone=lambda: gone, within_s=within_s)


def test_the_code_is_there_until_the_next_attempt_begins(tmp_path):
    assert exit_code_of_rank_zero(tmp_path) is None
    leave_exit_code(tmp_path, 75)
    assert exit_code_of_rank_zero(tmp_path) == 75
    forget_exit_code(tmp_path)
    forget_exit_code(tmp_path)
    assert exit_code_of_rank_zero(tmp_path) is None


def test_what_another_launch_or_another_program_has_left_is_no_code(tmp_path, monkeypatch):
    monkeypatch.setenv("GENLIGHT_LAUNCH_ID", "first")
    leave_exit_code(tmp_path, 75)
    monkeypatch.setenv("GENLIGHT_LAUNCH_ID", "second")
    assert exit_code_of_rank_zero(tmp_path) is None
    for text in ("", "{", '{"exit_code":256,"launch":"second"}', "[" * 100_000):
        (tmp_path / FILE).write_text(text)
        (tmp_path / FILE).chmod(0o600)
        assert exit_code_of_rank_zero(tmp_path) is None


def test_a_rank_zero_that_is_seen_is_waited_for_though_it_has_left_its_code(tmp_path):
    leave_exit_code(tmp_path, 75)
    is_there = threading.Event()
    is_there.set()
    codes = []
    waits = threading.Thread(
        target=lambda: codes.append(
            wait_for_rank_zero(tmp_path, is_gone=lambda: not is_there.is_set(), within_s=0.0)
        )
    )  # fmt: skip
    waits.start()
    time.sleep(0.3)
    assert codes == []
    is_there.clear()
    waits.join()
    assert codes == [75]


def test_one_that_is_gone_without_a_code_or_cannot_be_seen_is_not_waited_for_in_vain(tmp_path):
    assert wait(tmp_path, gone=True) is None
    assert wait(tmp_path, gone=None, within_s=0.0) is None
    leave_exit_code(tmp_path, 1)
    assert wait(tmp_path, gone=None) == 1
