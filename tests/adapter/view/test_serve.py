"""``genlight serve`` asked as a stranger would: by foreign names, for files elsewhere, without a token."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from genlight.adapter.cli import main
from genlight.adapter.view.site import Runs
from genlight.adapter.view.summary import RunSummary, exposition
from genlight.reporters.events.event_log import EventLog
from support.seen_runs import served, serving

pytestmark = pytest.mark.promise(name="events")

SECRET = b"\x89PNG\r\n\x1a\nsecret"


@pytest.fixture(scope="module")
def folder(runs, tmp_path_factory):
    """A folder with a run that has links to files outside it, and a secret next to it."""
    place = tmp_path_factory.mktemp("served")
    (place / "secret.png").write_bytes(SECRET)
    below = place / "runs"
    run = shutil.copytree(runs / "done", below / "a b" / "done")
    (below / "link").symlink_to(runs / "broken", target_is_directory=True)
    (run / "samples/link.png").symlink_to(place / "secret.png")
    (run / "samples/out").symlink_to(place, target_is_directory=True)
    (run / "samples/huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(30_000_000))
    (run / "samples/page.html").write_text("<script>alert(1)</script>")
    os.mkfifo(run / "samples/pipe.png")
    return below


@pytest.fixture(scope="module")
def site(folder):
    with served(folder) as address:
        yield address


@pytest.fixture(scope="module")
def guarded(folder):
    with served(folder, "--token") as address:
        yield address


def ask(site, path, method="GET", **headers):
    """Status, headers and body of an answer; `path` is sent as it is."""
    parts = urlsplit(site)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


RUN = quote("a b/done")


def test_all_runs_below_the_folder_are_listed_and_links_are_not_followed(site):
    status, headers, body = ask(site, "/runs.json")
    assert (status, [each["address"] for each in json.loads(body)["list"]]) == (200, ["a b/done"])
    assert headers["x-content-type-options"] == "nosniff"
    again = ask(site, "/runs.json", If_None_Match=headers["etag"])
    assert (again[0], again[2]) == (304, b"")


def test_a_run_in_full_has_addresses_of_its_pictures(site):
    status, _, body = ask(site, f"/data.json?run={RUN}")
    run = json.loads(body)["runs"][0]
    source = next(file["source"] for file in run["samples"][-1]["files"] if "source" in file)
    status, headers, picture = ask(site, f"/{source}")
    assert (status, headers["content-type"], picture[:4]) == (200, "image/png", b"\x89PNG")
    assert "sandbox" in headers["content-security-policy"]


def test_other_files_are_downloaded_and_a_huge_picture_is_sent_in_pieces(site):
    _, headers, body = ask(site, f"/file?run={RUN}&path=samples/page.html")
    assert (headers["content-type"], headers["content-disposition"]) == ("application/octet-stream", "attachment")
    assert body.startswith(b"<script>")
    assert len(ask(site, f"/file?run={RUN}&path=samples/huge.png")[2]) == 30_000_008


@pytest.mark.parametrize(
    "path",
    [
        "samples/link.png", "samples/out/secret.png", "samples/pipe.png", "samples/..%2f..%2f..%2f../secret.png",
        "samples//etc/passwd", ".lock", "metrics/events.jsonl", "samples/", "samples/nul%00.png", "",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_samples_of_a_run(site, path):
    status, _, body = ask(site, f"/file?run={RUN}&path={path}")
    assert (status, b"secret" in body) == (404, False)


@pytest.mark.parametrize("run", ["..", "../runs/a%20b/done", "link", "/etc", "", "a%20b", "%00"])
@pytest.mark.parametrize("where", ["data.json?", "file?path=samples/x&", "checkpoint?name=final&"])
def test_an_address_that_is_no_listed_run_is_not_found(site, where, run):
    assert ask(site, f"/{where}run={run}")[0] == 404


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/%2e%2e/secret.png", "//secret.png", "/metrics/events.jsonl"])
def test_no_address_is_a_path_of_the_disk(site, path):
    assert ask(site, path)[0] == 404


@pytest.fixture(scope="module")
def kept_open(runs, tmp_path_factory):
    """A server of runs whose files are missing, large or elsewhere, and a function that counts its open files."""
    place = tmp_path_factory.mktemp("descriptors")
    for name in ("torn", "large", "linked", "inside"):
        shutil.copytree(runs / "done", place / "runs" / name)
    (place / "runs/torn/checkpoints/final/training_state.safetensors").unlink()
    (place / "runs/large/samples/large.bin").write_bytes(bytes(64 << 20))
    with (place / "runs/large/checkpoints/final/model.safetensors").open("ab") as file:
        file.truncate(64 << 20)
    shutil.move(place / "runs/linked/checkpoints", place / "elsewhere")
    (place / "runs/linked/checkpoints").symlink_to(place / "elsewhere", target_is_directory=True)
    shutil.move(place / "runs/inside/checkpoints", place / "runs/inside/real")
    (place / "runs/inside/checkpoints").symlink_to("real", target_is_directory=True)
    with serving(place / "runs") as (process, address):
        ask(address, "/runs.json")
        yield address, lambda: len(os.listdir(f"/proc/{process.pid}/fd"))


def aborted(site, path):
    """Ask for `path` and leave before the answer is over."""
    parts = urlsplit(site)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        assert connection.recv(200)


@pytest.mark.parametrize(
    ("get", "path"),
    [
        (ask, "/checkpoint?run=torn&name=final"),
        (aborted, "/checkpoint?run=large&name=final"),
        (aborted, "/file?run=large&path=samples/large.bin"),
        (ask, "/checkpoint?run=large&name=final"),
    ],
    ids=["a file is missing", "the client leaves", "the client leaves a file", "all is sent"],
)
def test_no_file_stays_open_however_a_transfer_ends(kept_open, get, path):
    site, count = kept_open
    before = count()
    for _ in range(4):
        get(site, path)
    tries = 0
    while count() > before:  # connections close a moment later
        time.sleep(0.05)
        tries += 1
        assert tries < 600


def test_a_checkpoint_behind_a_link_is_sent_only_from_within_the_run(kept_open):
    site, _ = kept_open
    status, _, body = ask(site, "/checkpoint?run=linked&name=final")
    assert (status, b"outside the run's folder" in body) == (404, True)
    assert ask(site, "/checkpoint?run=inside&name=final")[2][:10] == b"final.json"


@pytest.mark.parametrize("name", ["../done", "absent", "final/../final", "%0d%0aX: y", ""])
def test_a_checkpoint_is_found_only_by_its_name(site, name):
    assert ask(site, f"/checkpoint?run={RUN}&name={quote(name, safe='%')}")[0] == 404
    assert ask(site, f"/checkpoint?run={RUN}&name=final")[2][:10] == b"final.json"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "", "[::1", "127.0.0.1.nip.io"]
)
def test_a_foreign_host_is_refused(site, guarded, host):
    for address in (site, guarded):
        assert ask(address, "/runs.json", Host=host)[0] in (400, 421)
        assert ask(address, f"/stop?run={RUN}", "POST", Host=host, X_Genlight="stop")[0] in (400, 421)
    for known in ("localhost:9", "[::1]:8", "127.0.0.1"):  # as through a tunnel
        assert ask(site, "/runs.json", Host=known)[0] == 200


def test_only_a_page_of_the_server_stops_a_run(site, folder):
    stop, request = f"/stop?run={RUN}", folder / "a b/done/.stop"
    assert ask(site, stop, "POST")[0] == 403, "a form of another page"
    assert ask(site, stop, "POST", X_Genlight="stop", Origin="http://evil.example")[0] == 403
    assert ask(site, stop, "POST", X_Genlight="stop", Origin="null")[0] == 403
    assert ask(site, stop, "GET", X_Genlight="stop")[0] == 405
    assert ask(site, "/stop?run=..", "POST", X_Genlight="stop")[0] == 404
    assert not request.exists()
    assert ask(site, stop, "POST", X_Genlight="stop", Origin=site.rstrip("/"))[0] == 200
    assert request.exists()
    request.unlink()


def test_a_token_is_asked_for_and_leaves_the_address(guarded):
    token = urlsplit(guarded).query.removeprefix("token=")
    assert ask(guarded, "/runs.json")[0] == 401
    assert ask(guarded, "/?token=wrong")[0] == 401
    assert ask(guarded, f"/file?run={RUN}&path=samples/huge.png", Authorization="Bearer wrong")[0] == 401
    assert ask(guarded, f"/stop?run={RUN}&token={token}", "POST", X_Genlight="stop")[0] == 401
    status, headers, _ = ask(guarded, f"/?token={token}")
    assert (status, headers["location"]) == (303, "?")
    assert {"HttpOnly", "SameSite=strict"} <= set(headers["set-cookie"].split("; "))
    assert ask(guarded, "/runs.json", Cookie=headers["set-cookie"].partition(";")[0])[0] == 200
    assert ask(guarded, "/runs.json", Authorization=f"Bearer {token}")[0] == 200


def test_a_probe_needs_no_token_and_prometheus_reads_the_figures(site, guarded):
    assert ask(guarded, "/healthz")[::2] == (200, b"ok\n")
    assert ask(guarded, "/metrics")[0] == 401
    status, headers, body = ask(site, "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    lines = body.decode().splitlines()
    assert 'genlight_run_state{run="a b/done",state="completed"} 1' in lines
    assert 'genlight_run_state{run="a b/done",state="running"} 0' in lines
    assert 'genlight_run_step{run="a b/done"} 40.0' in lines
    of_live_runs = ("genlight_run_steps_per_second{", "genlight_run_checkpoint_age_seconds{")
    assert not any(line.startswith(of_live_runs) for line in lines), "it does not run any more"


def test_the_figures_of_a_run_that_runs_and_awkward_names():
    run = dict.fromkeys(RunSummary(Path(), Path(), "r", "running").as_json())
    run |= {"address": 'a"\n\\', "state": "running", "step": 3, "steps_per_s": 2.5, "loss": "nan", "waiting_uploads": 2}
    lines = exposition([{**run, "checkpoint_ms": 1000, "attempt_goodput": 0.5, "cost": 7}], 61_000).splitlines()
    assert dict(line.rsplit(" ", 1) for line in lines if line[0] != "#" and "state" not in line) == {
        f'genlight_run_{name}{{run="a\\"\\n\\\\"}}': value
        for name, value in [
            ("step", "3.0"), ("steps_per_second", "2.5"), ("loss", "nan"), ("checkpoint_age_seconds", "60.0"),
            ("uploads_waiting", "2.0"), ("goodput_ratio", "0.5"), ("cost", "7.0"),
        ]
    }  # fmt: skip


def test_a_proxy_may_show_the_page_below_a_path(folder):
    with served(folder, "--token", "--prefix", "/team/runs/", "--allow-host", "runs.example") as address:
        path, _, token = urlsplit(address).path, *urlsplit(address).query.partition("token=")[1:]
        assert path == "/team/runs/"
        assert ask(address, "/team/runs", Authorization=f"Bearer {token}")[1]["location"] == "/team/runs/"
        cookie = ask(address, f"{path}?token={token}")[1]["set-cookie"]
        assert "Path=/team/runs;" in f"{cookie};"
        for known in (path, "/"):  # the proxy keeps the path or removes it
            assert ask(address, f"{known}runs.json", Authorization=f"Bearer {token}")[0] == 200
        assert ask(address, "/team/runsruns.json", Authorization=f"Bearer {token}")[0] == 404
        stop = {"Authorization": f"Bearer {token}", "X_Genlight": "stop"}
        assert ask(address, f"{path}stop?run={RUN}", "POST", Origin="https://runs.example", **stop)[0] == 200
        assert ask(address, f"{path}stop?run={RUN}", "POST", Origin="https://runs.example.evil", **stop)[0] == 403
    (folder / "a b/done/.stop").unlink()


def test_many_runs_are_read_once(tmp_path):
    for number in range(200):
        log = tmp_path / f"sweep-{number:04}" / "metrics" / "events.jsonl"
        log.parent.mkdir(parents=True)
        if number:
            shutil.copy(tmp_path / "sweep-0000" / "metrics" / "events.jsonl", log)
            continue
        with EventLog(log, run_id="r") as events:
            events.started(metadata={"job": {"max_steps": 500}})
            for step in range(1, 501):
                events.metric(name="train/loss", value=1 / step, step=step)
            events.completed(step=500, final_checkpoint=None)
    runs = Runs(tmp_path)
    first = runs.listing()
    give_up_at = time.monotonic() + 60
    while sum(each["size_bytes"] > 0 for each in runs.listing()) < 200:
        assert time.monotonic() < give_up_at, "files are not counted"
    before = {address: summary for address, (summary, _) in runs._listed.items()}
    assert len(runs.listing()) == len(first) == 200
    assert all(summary is before[address] for address, (summary, _) in runs._listed.items()), "nothing is read again"
    assert {(each["state"], each["step"]) for each in first} == {("completed", 500)}

    log = tmp_path / "sweep-0007" / "metrics" / "events.jsonl"
    with EventLog(log, run_id="r") as events:
        events.started()
    changed = {each["address"]: each for each in runs.listing()}
    assert (changed["sweep-0007"]["attempts"], changed["sweep-0008"]["attempts"]) == (2, 1)
    assert len(changed["sweep-0007"]["losses"]) == 32, "counts stay until there are newer ones"


def test_a_missing_server_package_and_a_foreign_address_are_reported(tmp_path, capsys):
    hide = "import sys; sys.modules['uvicorn'] = None; from genlight.adapter.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", hide, "serve", str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2, "genlight serve: uvicorn is not installed: pip install 'starlette>=0.40' 'uvicorn>=0.30'\n",
    )  # fmt: skip
    assert main(["serve", str(tmp_path), "--host", "203.0.113.1"]) == 2
    said = capsys.readouterr().err
    assert "cannot listen at 203.0.113.1 port 8765" in said
