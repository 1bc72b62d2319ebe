"""A real headless Chromium, Debian's own, driven by playwright."""

import contextlib
import shutil
import time
from importlib import resources

import pytest

CHROMIUM = shutil.which("chromium")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian's package)")

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--no-first-run"]


@contextlib.contextmanager
def chromium():
    """The browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser, address, **options):
    """Open a page at `address`; fail if it logs an error or breaks its content policy."""
    faults = []
    context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.on("console", lambda message: message.type == "error" and faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    try:
        page.goto(address)
        page.wait_for_selector("h1")
        yield page
        assert not faults, faults
    finally:
        context.close()


def wait_until(page, expression):
    """Wait until a JavaScript expression holds; playwright's own way to wait needs ``eval``, and pages forbid that."""
    give_up_at = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < give_up_at, f"{expression} does not come true"
        page.wait_for_timeout(50)


def violations(page):
    """Return the findings of axe-core on the page: the name of each rule and the elements that break it."""
    script = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
    page.evaluate(script)  # the policy of the page forbids a script element
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return {each["id"]: [node["html"] for node in each["nodes"]] for each in found}
