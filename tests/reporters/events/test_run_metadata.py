"""The origin of a run in checkpoint records and event logs."""

import importlib.metadata
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from genlight.reporters.events import run_metadata as subject
from genlight.reporters.events.run_metadata import (
    command_line,
    git_state,
    installed_packages,
    metadata_of_module,
    run_metadata,
)

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")


@pytest.fixture
def project(tmp_path):
    """A repository with one committed file, independent of the git configuration of this machine."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "trainer.py").write_text("x = 1\n")
    for command in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "one")):
        subprocess.run([*GIT, *command], cwd=folder, check=True, capture_output=True)
    git_state.cache_clear()
    yield folder
    git_state.cache_clear()


def commit_of(folder) -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_changed_file_makes_it_dirty_and_an_unknown_one_does_not(project):
    (project / "deep").mkdir()
    (project / "notes.txt").write_text("not known to git")
    clean = {"commit": commit_of(project), "dirty": False}
    assert git_state(str(project)) == git_state(str(project / "deep")) == clean

    git_state.cache_clear()
    (project / "trainer.py").write_text("x = 2\n")
    assert git_state(str(project))["dirty"] is True


def test_a_repository_without_a_commit_and_no_repository_have_no_state(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    subprocess.run(["git", "init", "--quiet", tmp_path / "empty"], check=True)
    (tmp_path / "plain").mkdir()

    assert git_state(str(tmp_path / "empty")) is None
    assert git_state(str(tmp_path / "plain")) is None
    assert git_state(str(tmp_path / "absent")) is None
    assert not {"git", "notes", "source", "tags"} & set(run_metadata(project=tmp_path))


@pytest.mark.parametrize("is_installed", [False, True])
def test_no_git_and_one_that_takes_too_long_are_no_error(project, tmp_path, monkeypatch, is_installed):
    if is_installed:
        (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(subject, "GIT_SECONDS", 0.05)

    assert git_state(str(project)) is None


def test_a_repository_runs_no_program_of_its_own_when_it_is_asked(project, tmp_path):
    """`core.fsmonitor` of a repository's configuration names a program that `git status` would start."""
    ran = tmp_path / "ran"
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {ran}\n")
    hook.chmod(0o755)
    subprocess.run(["git", "config", "core.fsmonitor", str(hook)], cwd=project, check=True)

    assert git_state(str(project)) is not None
    assert not ran.exists()


def test_packages_have_the_versions_that_importlib_reports():
    found = installed_packages()

    for name in ("torch", "lightning", "pytest", "huggingface-hub"):
        assert found[name] == importlib.metadata.version(name)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["genlight", "run", "job.json", "--set", "max_steps=80"], "genlight run job.json --set max_steps=80"),
        (["x", "--set", "capability_token=s3cret"], "x --set 'capability_token=<hidden>'"),
        (["x", "--set", "hyperparams.api_key=s3cret"], "x --set 'hyperparams.api_key=<hidden>'"),
        (["x", "--job.hyperparams.api_key", "s3cret", "a b"], "x --job.hyperparams.api_key '<hidden>' 'a b'"),
        (["x", "--password=s3cret"], "x '--password=<hidden>'"),
        (["x", "--set", 'p={"api_key": "s3cret7890"}'], """x --set 'p={"api_key": "<hidden>"}'"""),
        (["x", "https://me:s3cret@host/a?sig=s3cret"], "x 'https://host/a<hidden>'"),
        (["x", "known-to-be-s3cret"], "x <hidden>"),
        (["x", "--pad_token", "7"], "x --pad_token 7"),
    ],
)
def test_the_command_line_holds_no_secret(arguments, expected):
    shown = command_line(arguments, secrets=["known-to-be-s3cret"])

    assert "s3cret" not in shown
    assert shown == expected


def test_the_command_line_holds_no_value_of_the_environment(monkeypatch):
    monkeypatch.setenv("MY_HUB", "hub-of-mine")

    assert command_line(["x", "hub-of-mine"]) == "x $MY_HUB"


def test_a_program_that_was_started_as_a_module_is_named_so(tmp_path):
    (tmp_path / "started.py").write_text(
        "from genlight.reporters.events.run_metadata import command_line\nprint(command_line())\n"
    )
    command = [sys.executable, "-m", "started", "a b"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)

    assert done.stdout == "python -m started 'a b'\n"


def test_tags_and_notes_are_kept_and_hold_no_secret(project):
    found = run_metadata(project=project, secrets=["tok-12345"], tags=["baseline"], notes="with tok-12345 and 2 words")

    assert found["tags"] == ["baseline"]
    assert found["notes"] == "with <hidden> and 2 words"
    assert found["host"] == socket.gethostname()
    assert found["git"]["commit"] == commit_of(project)
    assert list(found) == sorted(found)


def test_git_describes_the_class_or_for_an_installed_class_the_folder_of_the_job(project, monkeypatch, tmp_path):
    (project / "own_project_module.py").write_text("class Own: ...\n")
    monkeypatch.syspath_prepend(str(project))
    import own_project_module

    own = run_metadata(own_project_module.Own(), project=tmp_path)
    assert own["git"]["commit"] == commit_of(project)
    assert own["source"].startswith("sha256:")
    installed = run_metadata(pytest.Session.__new__(pytest.Session), project=project)
    assert installed["git"] == own["git"]
    assert installed["source"] != own["source"]
    assert metadata_of_module(SimpleNamespace())["host"]
    del sys.modules["own_project_module"]
