"""A neighbour who was in the folder first: with links, pipes, devices, locks and directories."""

import fcntl
import os
import socket
import stat
import subprocess
import sys

import pytest

from genlight.adapter.contract.exceptions import EventLogError, StartupContractError, UploadError
from genlight.adapter.plumbing import safe_open
from genlight.adapter.plumbing.durable import make_directory
from genlight.adapter.plumbing.failures import Failure
from genlight.adapter.plumbing.safe_open import (
    distrust,
    open_own,
    open_regular,
    read_own,
    read_regular,
)
from genlight.adapter.run.folder import lock_artifacts, lock_holder, prepare_artifact_dirs, untrusted_dirs
from genlight.adapter.run.rank_files import RankFiles
from genlight.adapter.run.run import log_of_failed_start
from genlight.callbacks.stop.sources import cancel_file_is_set
from genlight.reporters.events.event_log import EventLog
from genlight.reporters.uploads.queue import Queue, read_entries
from support.messages import refusal

NOT_REGULAR = "it is not a regular file"
STRANGER = 54_321
"""The user of the fixture `stranger`."""


@pytest.fixture
def victim(tmp_path):
    """A file of the user that links lead to; it must stay as it is."""
    path = tmp_path / "victim"
    path.write_text("precious\n")
    yield path
    assert path.read_text() == "precious\n"


@pytest.fixture(params=["pipe", "socket", "device", "directory"])
def irregular(request, tmp_path):
    """Make an object in the place of a file that would block a reader or never end."""
    path = tmp_path / "irregular"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    elif request.param == "directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    return path


# opening


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_APPEND])
def test_a_link_is_not_followed_to_a_file_of_ours(tmp_path, victim, flags):
    (tmp_path / "link").symlink_to(victim)
    with refusal(OSError):
        open_own(tmp_path / "link", flags)


FLIPS = """
import os, sys
folder, victim, uid = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.chdir(folder)
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
print("ready", flush=True)
while True:
    for make in (lambda: os.symlink(victim, "new"), lambda: os.link("own", "new")):
        make()
        os.rename("new", "race")
        try:
            os.remove("new")  # a rename of one link to another of the same file does nothing
        except FileNotFoundError:
            pass
"""


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND, os.O_RDWR | os.O_CREAT])
def test_another_user_who_puts_links_and_files_in_turns_never_has_one_followed_or_used(
    tmp_path, victim, stranger, flags
):
    """A second user of the machine, in a process of theirs, in a folder that everybody may write."""
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "own").write_text("theirs\n")
    os.chown(folder / "own", stranger, stranger)
    folder.chmod(0o777)
    process = subprocess.Popen([sys.executable, "-c", FLIPS, folder, victim, str(stranger)], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        refused = set()
        for _ in range(2000):
            try:
                descriptor = open_own(folder / "race", flags)
            except OSError as error:
                refused.add(type(error))
                continue
            try:  # with O_CREAT the name may have been free for a moment; then the file is new, and ours
                status = os.fstat(descriptor)
                assert (status.st_uid, status.st_size) == (os.geteuid(), 0)
                assert not os.path.samestat(status, victim.stat())
                assert flags & os.O_CREAT
            finally:
                os.close(descriptor)
        assert refused
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_what_is_no_regular_file_is_neither_waited_for_nor_read(irregular):
    for attempt in (
        lambda: open_own(irregular, os.O_RDONLY),
        lambda: open_own(irregular, os.O_WRONLY),
        lambda: open_regular(irregular),
        lambda: read_own(irregular, limit=10),
        lambda: read_regular(irregular, limit=10),
    ):
        with pytest.raises(OSError, match=f"{NOT_REGULAR}|symbolic link|No such device|directory"):
            attempt()


def test_a_file_that_is_larger_than_may_be_read_is_refused_before_memory_is_taken(tmp_path):
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 43)  # a sparse file of 8 TiB
    with refusal(OSError):
        read_regular(tmp_path / "huge", limit=1000)


def test_a_file_of_another_user_is_refused_by_name(tmp_path, stranger):
    path = tmp_path / ".lock"
    path.write_text("")
    os.chown(path, stranger, -1)
    with pytest.raises(OSError, match=f"belongs to another user \\(uid {stranger}\\); remove it"):
        open_own(path, os.O_RDWR | os.O_CREAT)


def test_a_second_name_of_a_file_is_refused_in_a_folder_of_somebody_else(tmp_path, victim, stranger):
    (tmp_path / "theirs").mkdir()
    os.link(victim, tmp_path / "theirs" / ".lock")
    os.chown(tmp_path / "theirs", stranger, -1)
    with refusal(OSError):
        open_own(tmp_path / "theirs" / ".lock", os.O_RDWR | os.O_CREAT)


# directories


def test_in_a_shared_folder_the_umask_says_who_may_enter(tmp_path):
    before = os.umask(0o007)
    try:
        make_directory(tmp_path / "a", shared=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o770


EVERYBODY, GROUP = "every user of this machine can write to it (`chmod o-w,g-w`", "can write to it (`chmod g-w`"


@pytest.mark.parametrize(
    ("mode", "owner", "group", "may_be_sticky", "fault"),
    [
        (0o755, -1, -1, False, None),
        (0o777, -1, -1, False, EVERYBODY),
        (0o1777, -1, -1, True, None),
        (0o1777, -1, -1, False, EVERYBODY),
        (0o755, STRANGER, -1, False, f"a directory that belongs to another user (uid {STRANGER})"),
        (0o2775, -1, 0, False, None),
        (0o2775, -1, STRANGER, False, GROUP),
    ],
    ids=["own", "open", "sticky file", "sticky", "a stranger's", "root's group", "another group"],
)
def test_a_directory_is_trusted_unless_others_may_change_its_contents(
    tmp_path, mode, owner, group, may_be_sticky, fault
):
    if os.geteuid() != 0 and (owner, group) != (-1, -1):
        pytest.skip("only root can give a folder to others")
    folder = tmp_path / "folder"
    folder.mkdir()
    os.chown(folder, owner, group)
    folder.chmod(mode)
    found = distrust(folder, may_be_sticky=may_be_sticky)
    assert found is None if fault is None else fault in found
    assert os.listdir(folder) == []  # the probe is gone


def test_a_link_that_another_user_made_is_not_trusted_wherever_it_leads(tmp_path, stranger):
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to("own")
    assert distrust(tmp_path / "link") is None  # one's own, as to a larger disk
    os.lchown(tmp_path / "link", stranger, -1)
    assert f"a link that belongs to another user (uid {stranger})" in distrust(tmp_path / "link")


def test_on_a_file_system_that_shows_one_owner_for_all_that_owner_is_trusted(tmp_path, stranger, monkeypatch):
    """As with ``root_squash``, files that this process makes also belong to that user."""
    squashed = tmp_path / "nfs"
    squashed.mkdir()
    os.chown(squashed, stranger, -1)
    made = safe_open._status_of_new_file

    def shown(directory):
        status = made(directory)
        return os.stat_result((*status[:4], stranger, *status[5:]))

    monkeypatch.setattr(safe_open, "_status_of_new_file", shown)
    assert distrust(squashed) is None


def test_on_a_file_system_without_permissions_these_say_nothing(tmp_path, monkeypatch):
    (tmp_path / "mnt").mkdir()
    (tmp_path / "mnt").chmod(0o777)
    made = safe_open._status_of_new_file

    def shown(directory):
        status = made(directory)
        return os.stat_result((status.st_mode | 0o777, *status[1:]))

    monkeypatch.setattr(safe_open, "_status_of_new_file", shown)
    assert distrust(tmp_path / "mnt") is None


def test_a_mounted_volume_is_trusted_as_it_is():
    """Like a container's volume: it belongs to root and is open to all; only an administrator can mount one."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is not mounted here")
    assert stat.S_IMODE(os.stat("/dev/shm").st_mode) & 0o002
    assert distrust("/dev/shm") is None


# a run


@pytest.mark.parametrize("job", [{}, {"shared_artifacts": True}], ids=["silent", "a job that allows it"])
def test_a_run_refuses_a_folder_that_others_may_write_and_names_the_ways_out(config_of, tmp_path, job):
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o777)
    with pytest.raises(StartupContractError) as caught:
        prepare_artifact_dirs(config_of(**job))
    assert caught.value.code == "startup.invalid_artifact_paths"
    for part in (
        "`artifacts_dir`",
        "every user of this machine",
        "`TRAINER_ARTIFACTS_DIR`",
        "TRAINER_SHARED_ARTIFACTS",
    ):
        assert part in caught.value.message
    assert os.listdir(tmp_path / "out") == []


def test_a_team_says_so_and_may_share_a_folder(config_of, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o777)
    prepare_artifact_dirs(config_of(environ={"TRAINER_SHARED_ARTIFACTS": "1"}))
    assert (tmp_path / "out" / "samples").is_dir()


def test_a_planted_folder_of_samples_is_refused(config_of, tmp_path, stranger):
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "samples").symlink_to(tmp_path / "elsewhere")
    os.lchown(tmp_path / "out" / "samples", stranger, -1)
    with refusal(StartupContractError):
        prepare_artifact_dirs(config_of())


def test_a_failed_start_writes_no_event_into_a_folder_of_others(config_of, tmp_path):
    (tmp_path / "out" / "metrics").mkdir(parents=True)
    (tmp_path / "out" / "metrics").chmod(0o777)
    config = config_of()
    assert config.artifacts_dir == tmp_path / "out"
    assert log_of_failed_start(config, is_from_file=True) is None


def _begin(config):
    """Open all that a run writes to."""
    with lock_artifacts(config), EventLog(config.events_path, run_id="r"):
        Queue(config.artifacts_dir / "uploads").close()


@pytest.mark.parametrize("name", [".lock", "metrics/events.jsonl", "uploads/000000001.json", "uploads/lock"])
def test_a_planted_link_is_never_written_through(config_of, tmp_path, victim, name):
    config = config_of()
    prepare_artifact_dirs(config)
    link = tmp_path / "out" / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(victim)
    with refusal(StartupContractError, EventLogError, UploadError, OSError):
        _begin(config)


@pytest.mark.parametrize("name", [".lock", "metrics/events.jsonl", "uploads/000000001.json"])
def test_a_pipe_in_place_of_a_file_of_ours_is_not_waited_for(config_of, tmp_path, name):
    config = config_of()
    prepare_artifact_dirs(config)
    path = tmp_path / "out" / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises((StartupContractError, EventLogError, UploadError, OSError), match=NOT_REGULAR):
        _begin(config)
    assert lock_holder(tmp_path / "out") is None
    if name.startswith("uploads"):
        with pytest.raises(UploadError, match=NOT_REGULAR):
            read_entries(path.parent)


def test_a_file_system_without_locks_is_told_in_our_own_words(config_of, tmp_path, monkeypatch):
    config = config_of()
    prepare_artifact_dirs(config)

    def refuse(descriptor, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StartupContractError) as caught, lock_artifacts(config):
        pass
    assert caught.value.code == "startup.artifacts_in_use"
    for part in ("Function not implemented", "`TRAINER_ARTIFACTS_DIR`", "file system with locks"):
        assert part in caught.value.message
    assert lock_holder(tmp_path / "out") is None


# notes of ranks and the cancel file


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"at_s": 1}',
        b'{"category": "own3d", "text": "x", "resumable": true, "exit_code": 1, "rank": 0, "at_s": 9e9, "launch": ""}',
        b'{"category": "input", "text": 3, "resumable": true, "exit_code": 1, "rank": 0, "at_s": 9e9, "launch": ""}',
        b'{"category": "input", "text": "x", "resumable": true, "exit_code": -1, "rank": 0, "at_s": 9e9, "launch": ""}',
        b"[" * 100_000,
    ],
)
def test_a_note_that_no_rank_can_have_written_is_ignored_with_a_warning(tmp_path, caplog, content):
    ranks = RankFiles(tmp_path)
    ranks.folder.mkdir()
    (ranks.folder / "rank-1.json").write_bytes(content)
    assert ranks.failures() == []
    assert ranks.failures() == []
    (warning,) = caplog.messages
    assert "rank-1.json is ignored" in warning
    ranks.record(2, Failure("input", "input:x", resumable=False, exit_code=1))
    assert [note.failure.text for note in ranks.failures()] == ["input:x (rank 2)"]


def test_a_note_of_another_user_is_ignored(tmp_path, stranger):
    ranks = RankFiles(tmp_path)
    ranks.record(1, Failure("input", "input:x", resumable=False, exit_code=1))
    os.chown(ranks.folder / "rank-1.json", stranger, -1)
    assert ranks.failures() == []


def test_a_note_that_is_a_pipe_or_a_link_is_not_waited_for(tmp_path):
    ranks = RankFiles(tmp_path)
    ranks.folder.mkdir()
    os.mkfifo(ranks.folder / "rank-1.json")
    (ranks.folder / "rank-2.json").symlink_to("/dev/zero")
    assert ranks.failures() == []


def test_a_cancel_file_that_is_a_pipe_or_a_device_counts_as_set_at_once(irregular):
    assert cancel_file_is_set(irregular)


def test_folders_that_cannot_be_looked_at_are_left_to_whoever_uses_them(config_of, tmp_path):
    (tmp_path / "file").write_text("")
    environ = {"TRAINER_ARTIFACTS_DIR": str(tmp_path / "file" / "a"), "TRAINER_EVENTS_PATH": str(tmp_path / "b" / "e")}
    assert untrusted_dirs(config_of(environ=environ)) == []
