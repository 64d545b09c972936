"""Makes the README's pictures of the lab, docs/lab-*.png, from any checkpoint:

    .venv/bin/python scripts/screenshots.py runs/glasslm/best "Once upon a time"

Needs the extra `dev` and a chromium (Debian: apt install chromium fonts-liberation).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

DOCS = Path(__file__).parent.parent / "docs"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
WIDE, NARROW = (1280, 880), (400, 860)
LARGEST = 300_000  # bytes of a picture


def wait(page: Page, stage: str, number: int) -> None:
    """Until map and inspector show that stage of that pass."""
    page.locator(f'#inspector[data-stage="{stage}"][data-pass="{number}"]').wait_for(state="attached")
    page.locator(f'#canvas svg[data-pass="{number}"]').wait_for(state="attached")


def choose(page: Page, stage: str, number: int) -> None:
    page.locator(f'#canvas [data-stage="{stage}"]').click()
    wait(page, stage, number)


def unfold(page: Page, block: int, number: int) -> None:
    page.locator(f"#canvas [data-block='{block}']").click()
    page.locator(f'#canvas [data-stage="blocks.{block}.weights"]').wait_for(state="attached")
    wait(page, "embed", number)


def go_on(page: Page, tokens: int) -> None:
    page.fill("#temperature", "0")
    for number in range(1, tokens + 1):
        page.click("#next")
        wait(page, "embed", number)
    page.locator("#next:enabled").wait_for()


def the_map(page: Page) -> None:
    go_on(page, 3)
    page.locator("#steps button").first.click()
    wait(page, "embed", 0)


def attention(page: Page) -> None:
    unfold(page, 1, 0)
    choose(page, "blocks.1.weights", 0)
    page.locator("[data-head='2']").click()
    page.locator("[data-head='2'][aria-pressed=true]").wait_for()


def cached(page: Page) -> None:
    go_on(page, 4)
    unfold(page, 0, 4)
    choose(page, "blocks.0.keys", 4)


def logits(page: Page) -> None:
    go_on(page, 2)
    choose(page, "logits", 2)


def lens(page: Page) -> None:
    page.click("#lens")
    page.locator("#lens-table").wait_for()


def unfolded(page: Page) -> None:
    unfold(page, 0, 0)


# name: what to show, the size of the screen, the theme
PICTURES: dict[str, tuple[Callable[[Page], None], tuple[int, int], Any]] = {
    "lab-map": (the_map, WIDE, "light"),
    "lab-attention": (attention, WIDE, "light"),
    "lab-cached": (cached, WIDE, "dark"),
    "lab-logits": (logits, WIDE, "dark"),
    "lab-lens": (lens, WIDE, "light"),
    "lab-narrow-light": (unfolded, NARROW, "light"),
    "lab-narrow-dark": (attention, NARROW, "dark"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("checkpoint")
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--out", type=Path, default=DOCS)
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "llmcli", "lab", options.checkpoint, options.prompt, "--port", "0", "--no-browser"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory() as profile,
        sync_playwright() as playwright,
    ):
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        browser = playwright.chromium.launch_persistent_context(
            profile, executable_path=shutil.which("chromium"), headless=True, args=FLAGS, device_scale_factor=1.25
        )
        for name, (steps, (width, height), theme) in PICTURES.items():
            page = browser.new_page()
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(color_scheme=theme, reduced_motion="reduce")
            page.goto(url)
            wait(page, "embed", 0)
            steps(page)
            page.mouse.move(0, 0)
            file = options.out / f"{name}.png"
            page.screenshot(path=file)
            page.close()
            size = file.stat().st_size
            print(f"{file}: {size:,} bytes{'' if size <= LARGEST else ', too large'}")
        browser.close()
        server.terminate()


if __name__ == "__main__":
    main()
