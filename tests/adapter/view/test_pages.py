"""The pages of ``genlight report`` and ``genlight serve`` in a real headless Chromium."""

from __future__ import annotations

import contextlib
import re
import shutil
import tarfile

import pytest

from genlight.adapter.cli import main
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


def canvas(page):
    """Scroll to the curves and return their position in the window."""
    page.locator(".chart").scroll_into_view_if_needed()
    return page.locator(".u-over").bounding_box()


def hover(page):
    box = canvas(page)
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
    return page.locator(".u-legend").inner_text()


def test_a_page_shows_runs_as_text(browser, three):
    with opened(browser, three) as page:
        text = page.locator("main").inner_text()
        assert page.locator("main b, main img[src=x], main script").count() == 0
        assert "no <b>luck</b>" in text
        names = page.locator("#metric option").all_text_contents()
        assert "<img src=x onerror=alert(1)>" in names
        assert "bell\\u0007" in names
        assert page.locator("canvas").count() == 1


def test_curves_react_to_zoom_hover_smoothing_and_axes(browser, three):
    with opened(browser, three) as page:
        whole = page.evaluate(WIDTH)
        assert re.search(r"done\s*[\d.]+\s*broken\s*[\d.]+", hover(page))
        box = canvas(page)
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + box["width"] * 0.1, middle)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.3, middle, steps=4)
        page.mouse.up()
        assert page.evaluate(WIDTH) == pytest.approx(whole / 5, rel=0.1)
        page.mouse.dblclick(box["x"] + 20, middle)
        assert page.evaluate(WIDTH) == pytest.approx(whole)

        page.locator("#zoom-in").focus()
        page.keyboard.press("Enter")
        assert page.evaluate(WIDTH) == pytest.approx(whole / 2)
        page.locator("#zoom-reset").press("Space")
        page.locator("#smooth").press("End")
        page.locator("#log").check()
        assert page.evaluate("window.chart.scales.y.distr") == 3
        page.locator("#time").check()
        assert page.evaluate("window.chart.scales.x.min") > 1e9
        page.locator("#metric").select_option("<img src=x onerror=alert(1)>")
        assert "values of <img" in page.locator(".chart .wide").get_attribute("aria-label")


def test_pictures_show_over_steps_and_events_are_filtered(browser, three):
    with opened(browser, three) as page:
        picture = page.locator("figure img").first
        picture.scroll_into_view_if_needed()
        wait_until(page, "document.querySelector('figure img').naturalWidth == 16")
        assert page.locator("output").first.inner_text() == "step 40"
        page.locator(".steps").first.press("Home")
        assert page.locator("output").first.inner_text() == "step 20"
        assert "not a picture" in page.locator(".samples").first.inner_text()

        events = page.locator("section", has=page.locator(".kind")).first
        assert "started" in events.locator("tbody").inner_text()
        page.locator(".kind").first.select_option("checkpoint")
        assert set(events.locator("tbody td:nth-child(2)").all_text_contents()) == {"checkpoint"}
        page.locator(".filter").first.fill("step-00000020")
        assert events.locator("tbody tr").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(browser, three, site, scheme):
    for address in (three, site):
        with opened(browser, address, color_scheme=scheme) as page:
            page.wait_for_selector("tbody tr")
            assert violations(page) == {}


def test_a_page_is_dark_for_those_who_like_it_and_prints_light(browser, three):
    paper = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, three, color_scheme="dark") as page:
        assert page.evaluate(paper) == "rgb(13, 17, 23)"
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate(paper) == "rgb(255, 255, 255)"
        assert not page.locator("#zoom-in").is_visible()
        assert len(page.pdf()) > 10_000


def test_a_list_is_filtered_and_its_runs_are_compared(browser, site):
    with opened(browser, site) as page:
        page.wait_for_selector("tbody tr")
        names, states = (page.locator(each).all_text_contents() for each in ("tbody th", "td.state"))
        assert dict(zip(names, states, strict=True)) == {"done": "completed", "broken": "failed", "killed": "lost"}
        page.locator("#state").select_option("failed")
        assert page.locator("tbody tr:visible th").all_text_contents() == ["broken"]
        page.locator("#state").select_option("all")
        page.locator("#filter").fill("done")
        assert page.locator("tbody tr:visible").count() == 1
        page.locator("#filter").fill("")
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
            page.wait_for_selector("canvas")
            before = page.evaluate(last)
            page.locator("#metric").select_option("train/loss")
            page.locator(".filter").first.fill("started")
            wait_until(page, f"{last} > {before + 100}")
            assert page.locator(".filter").first.input_value() == "started", "what a person has set stays"

            asked = []
            page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
            page.get_by_role("button", name="Stop this run").click()
            page.wait_for_selector("section .state.stopped")
            assert "live" in asked[0]
        assert process.wait(timeout=120) == 75
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def test_a_run_that_starts_later_is_shown(browser, runs, tmp_path):
    with served(tmp_path) as address, opened(browser, address) as page:
        assert "0 of 0 runs" in page.locator("main").inner_text()
        shutil.copytree(runs / "done", tmp_path / "later")
        page.wait_for_selector("tbody tr")
