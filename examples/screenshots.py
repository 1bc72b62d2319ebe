"""Take the pictures of runs in the README: the list, a run, its samples, and a comparison of runs.

Trains the digits example several times, shows it by ``genlight serve``, and has Debian's Chromium take the pictures::

    pip install playwright '.[serve]'            # playwright's own browser is not needed
    python examples/screenshots.py               # writes examples/pictures/*.png
    python examples/screenshots.py --runs runs --to pictures   # of your own runs
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
RATES = (0.0005, 0.002, 0.008, 0.03)
SAMPLES = 8
"""Number of steps with samples."""


def train(folder: Path, steps: int) -> None:
    """Train the digits example once for each of `RATES`, below `folder`."""
    for rate in RATES:
        name = f"lr-{rate}"
        settings = [f"run_id={name}", f"artifacts_dir={folder / name}", f"max_steps={steps}"]
        settings += [
            f"hyperparams.learning_rate={rate}",
            f"sample_every={steps // SAMPLES}",
            "price_per_device_hour=0.4",
        ]
        words = [word for setting in settings for word in ("--set", setting)]
        subprocess.run(["genlight", "run", str(HERE / "digits" / "job.json"), *words], check=True)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the runs below `folder`; yield the address."""
    process = subprocess.Popen(["genlight", "serve", str(folder), "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def take(page: Page, address: str, target: Path, *, height: int, at: str = "h1") -> None:
    """Take a picture of the page at `address`, from the element `at` on."""
    page.set_viewport_size({"width": 1280, "height": height})
    page.goto(address)
    page.wait_for_selector("tbody tr, canvas")
    page.wait_for_timeout(1000)  # pictures of samples are loaded when they become visible
    page.locator(at).first.evaluate("(element) => element.scrollIntoView()")
    page.wait_for_timeout(1000)
    page.screenshot(path=target)
    print(f"{target} ({target.stat().st_size:,} bytes)")


def main() -> None:
    """Train if the command names no runs, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, help="folder with runs; default: the digits example is trained")
    parser.add_argument("--steps", type=int, default=800, help="of each training")
    parser.add_argument("--to", type=Path, default=HERE / "pictures", help="folder for the pictures")
    args = parser.parse_args()
    chromium = shutil.which("chromium") or sys.exit("chromium is not installed: apt-get install chromium")
    args.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        runs = args.runs or Path(temporary, "runs")
        if args.runs is None:
            train(runs, args.steps)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        with served(runs) as address:
            take(page, address, args.to / "runs.png", height=340)
            names = page.locator("tbody a").all_text_contents()
            query = "&".join(f"run={name}" for name in names[:12])
            take(page, f"{address}run?{query}", args.to / "compared.png", height=760)
            best = f"{address}run?run={names[len(names) // 2]}"
            take(page, best, args.to / "run.png", height=760)
            take(page, best, args.to / "samples.png", height=560, at="#samples")
        browser.close()


if __name__ == "__main__":
    main()
