"""The pages of ``genlight report`` and ``genlight serve`` in a real headless Chromium."""

from __future__ import annotations

import contextlib
import math
import shutil
import tarfile

import pytest

from genlight.adapter.cli import main
from genlight.reporters import EventLog
from support.browser import chromium, needs_chromium, opened, violations, wait_until
from support.seen_runs import served, start, wait_for_step

pytestmark = [pytest.mark.promise(name="events"), needs_chromium, pytest.mark.slow]

WIDTH = "window.chart.scales.x.max - window.chart.scales.x.min"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
    """The address of a page of all three runs."""
    target = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", *(str(runs / name) for name in ("done", "broken", "killed")), "--to", str(target)]) == 0
    return target.as_uri()


@pytest.fixture(scope="module")
def site(runs):
    """The address of ``genlight serve`` of them."""
    with served(runs) as address:
        yield address


@pytest.fixture(scope="module", params=["report", "serve"])
def three(request):
    """The address of the same page as a file and live."""
    if request.param == "report":
        return request.getfixturevalue("report")
    return request.getfixturevalue("site") + "run?run=done&run=broken&run=killed"


def enlarge(page, metric):
    """Open the large chart of a metric; return the position of its plot in the window."""
    page.get_by_role("button", name=f"enlarge {metric}").click()
    return page.locator("dialog .u-over").bounding_box()


def test_a_page_shows_runs_as_text(browser, three):
    with opened(browser, three) as page:
        text = page.locator("main").inner_text()
        assert page.locator("main b img, main img[src=x], main script").count() == 0
        assert "no <b>luck</b>" in text
        names = page.locator(".card .title").all_text_contents()
        assert names[0] == "loss"
        assert "<img src=x onerror=alert(1)>" in names
        assert "bell\\u0007" in names
        wait_until(page, "document.querySelectorAll('.card canvas').length >= 3")


def test_curves_react_to_zoom_hover_smoothing_and_axes(browser, three):
    with opened(browser, three) as page:
        box = enlarge(page, "train/loss")
        whole, middle = page.evaluate(WIDTH), box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + box["width"] * 0.3, middle)
        page.mouse.move(box["x"] + box["width"] / 3, middle)
        assert {"done", "broken", "killed"} <= set(page.locator(".tip .name").all_text_contents())
        assert "step" in page.locator(".tip").inner_text()
        page.mouse.move(box["x"] + box["width"] * 0.1, middle)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.3, middle, steps=4)
        page.mouse.up()
        assert page.evaluate(WIDTH) == pytest.approx(whole / 5, rel=0.1)
        page.mouse.dblclick(box["x"] + 20, middle)
        assert page.evaluate(WIDTH) == pytest.approx(whole)
        page.locator("#zoom-in").press("Enter")
        assert page.evaluate(WIDTH) == pytest.approx(whole / 2)
        page.locator("#zoom-reset").press("Space")
        values = page.get_by_role("group", name="values of train/loss")
        assert values.locator("tbody th").all_text_contents() == ["done", "broken", "killed"]
        page.keyboard.press("Escape")
        page.locator("dialog").wait_for(state="detached")

        page.locator("#smooth").press("End")
        page.locator("#log").check()
        page.locator("#axis").select_option("clock")
        enlarge(page, "train/loss")
        assert page.evaluate("window.chart.scales.y.distr") == 3
        assert page.evaluate("window.chart.scales.x.min") > 1e9
        assert page.evaluate("window.chart.data.length") == 7, "each run smoothed, and as it is"
        page.keyboard.press("Escape")
        page.locator("#axis").select_option("elapsed")
        page.locator("#metric").fill("onerror")
        assert page.locator(".card:visible").count() == 1


def test_the_legend_filters_and_what_differs_names_only_the_runs_that_differ(browser, three):
    with opened(browser, three) as page:
        styles = page.evaluate("[...Array(24).keys()].map((i) => color(i) + dash(i)).join(' ')").split()
        assert len(set(styles)) == 24
        page.get_by_label("show broken").uncheck()
        enlarge(page, "train/loss")
        assert page.evaluate("window.chart.data.length") == 3
        page.keyboard.press("Escape")
        page.locator("#runs").fill("kill")
        assert page.locator(".legend li:visible").count() == 1
        row = page.locator("#what-differs tr", has_text="hyperparams.lr")
        assert row.locator("td").all_text_contents() == ["0.1 (2 runs)", "0.2broken"]


def test_samples_are_a_grid_and_events_are_filtered(browser, site):
    with opened(browser, f"{site}run?run=done") as page:
        assert page.locator(".samples thead th").all_text_contents() == ["step 40", "step 20"]
        assert page.locator(".samples .prompt").all_text_contents() == ["a <b>cat</b>"]
        assert "<script>alert(1)</script>" in page.locator(".samples td pre").first.inner_text()
        page.locator(".samples img").first.scroll_into_view_if_needed()
        wait_until(page, "document.querySelector('.samples img').naturalWidth == 16")
        page.locator(".samples .picture").first.click()
        assert page.locator("dialog img").get_attribute("alt") == "step 40, a <b>cat</b>"
        page.keyboard.press("Escape")

        page.locator("summary", has_text="events").click()
        events = page.locator("details", has=page.locator(".kind"))
        assert "started" in events.locator("tbody").inner_text()
        page.locator(".kind").select_option("checkpoint")
        assert set(events.locator("tbody td:nth-child(2)").all_text_contents()) == {"checkpoint"}
        page.locator(".filter").fill("step-00000020")
        assert events.locator("tbody tr").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(browser, three, site, scheme):
    for address in (three, site):
        with opened(browser, address, color_scheme=scheme) as page:
            page.wait_for_selector("tbody tr")
            assert violations(page) == {}


def test_a_list_is_filtered_and_its_runs_are_compared(browser, site):
    with opened(browser, site) as page:
        page.wait_for_selector("tbody tr")
        names, states = (page.locator(each).all_text_contents() for each in ("tbody th", "tbody .state"))
        assert dict(zip(names, states, strict=True)) == {"done": "completed", "broken": "failed", "killed": "lost"}
        assert page.locator(".spark").count() == 3
        assert page.locator("th.of-best").is_visible()
        page.get_by_role("button", name="progress").click()
        page.get_by_role("button", name="progress").click()
        assert page.locator("tbody th").first.inner_text() == "done"
        assert page.locator("th[aria-sort=descending]").inner_text() == "progress"
        page.locator("#state").select_option("failed")
        assert page.locator("tbody tr:visible th").all_text_contents() == ["broken"]
        page.locator("#state").select_option("all")
        page.locator("#find").fill("done")
        assert page.locator("tbody tr:visible").count() == 1
        page.locator("#find").fill("")
        for name in ("done", "broken"):
            page.get_by_label(f"choose {name}").check()
        page.locator("#compare").click()
        page.wait_for_selector("canvas")
        assert "hyperparams.lr" in page.get_by_role("region", name="What differs").inner_text()


def test_a_checkpoint_is_downloaded_completely(browser, runs, site, tmp_path):
    with opened(browser, f"{site}run?run=done") as page:
        with page.expect_download() as download:
            page.get_by_role("link", name="final.tar").click()
        download.value.save_as(tmp_path / "final.tar")
    with tarfile.open(tmp_path / "final.tar") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    assert main(["checkpoints", "verify", str(tmp_path / "there" / "final.json")]) == 0


def test_a_live_runs_curve_grows_and_stop_stops_it(browser, tmp_path):
    process = start(tmp_path, "live", max_steps=1_000_000, hyperparams={"pause_s": 0.005}, metric_every=1)
    try:
        wait_for_step(tmp_path / "runs/live", 20)
        with served(tmp_path / "runs") as address, opened(browser, f"{address}run?run=live") as page:
            last = "window.chart.data[0].at(-1)"
            page.locator("summary", has_text="events").click()
            page.locator(".filter").fill("started")
            enlarge(page, "train/loss")
            before = page.evaluate(last)
            wait_until(page, f"{last} > {before + 100}")
            page.keyboard.press("Escape")
            assert page.locator(".filter").input_value() == "started", "what a person has set stays"

            asked = []
            page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
            page.get_by_role("button", name="Stop this run").click()
            page.wait_for_selector(".tiles .state.stopped")
            assert "live" in asked[0]
        assert process.wait(timeout=120) == 75
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


NAMES = [
    "train/loss",
    "eval/accuracy",
    *(f"{'a_group_of_numbers/' + 'with_a_long_name_' * 4:.76}_{i:03}" for i in range(18)),
]
LAST = 2_000_000
OVERFLOW = """() => {
    const width = document.documentElement.clientWidth;
    const clips = (each) => getComputedStyle(each).overflowX != "visible";
    const is_clipped = ({ parentElement: outer }) => outer && (clips(outer) || is_clipped(outer));
    const all = [...document.querySelectorAll("main *")];
    const beyond = all.filter((each) => each.getBoundingClientRect().right > width + 1 && !is_clipped(each));
    return [document.documentElement.scrollWidth - width, ...beyond.map((each) => each.outerHTML)];
}"""


def write_run(folder, name, points):
    """A run of two million steps: a loss at `points` of them, and 19 more numbers at a few of these."""
    (folder / name / "metrics").mkdir(parents=True)
    (folder / name / ".lock").touch()
    with EventLog(folder / name / "metrics/events.jsonl", run_id=name) as log:
        log.started(metadata={"last_step": LAST, "ranks": 1, "job": {"max_steps": LAST, "hyperparams": {"name": name}}})
        for point in range(1, points + 1):
            names = NAMES if point % max(points // 20, 1) == 0 else NAMES[:1]
            step = point * LAST // points
            log.metrics({each: 4 * math.exp(-3 * step / LAST) for each in names}, step=step)
        log.completed(step=LAST, final_checkpoint=None)


@pytest.fixture(scope="module", params=[1, 12, 200])
def crowd(request, tmp_path_factory):
    """The addresses of the list and of a page of runs: one with 100,000 points, a comparison, the most of a list."""
    folder, names = (
        tmp_path_factory.mktemp("crowd"),
        [f"{'a-sweep-over-rates-' * 5:.76}-{i:03}" for i in range(request.param)],
    )
    for name in names:
        write_run(folder, name, {1: 100_000, 12: 200, 200: 20}[request.param])
    with served(folder) as address:
        yield address, address + "run?" + "&".join(f"run={name}" for name in names[:12])


def test_pages_of_many_runs_steps_and_metrics_fit_any_window(browser, crowd):
    for address in crowd:
        with opened(browser, address) as page:
            page.wait_for_selector("tbody tr, canvas")
            assert page.locator(".of-best:visible").count() == 0, "no run has a score"
            for width in (1920, 1280, 390):
                page.set_viewport_size({"width": width, "height": 900})
                page.wait_for_timeout(300)  # the charts follow the window
                assert page.evaluate(OVERFLOW) == [0], width
            assert violations(page) == {}


def test_a_run_that_starts_later_is_shown(browser, runs, tmp_path):
    with served(tmp_path) as address, opened(browser, address) as page:
        assert "0 of 0 runs" in page.locator("main").inner_text()
        shutil.copytree(runs / "done", tmp_path / "later")
        page.wait_for_selector("tbody tr")
