"""Pages in headless Chromium, where it is installed, driven by Playwright."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60.0
"""Seconds that a condition may take, on a busy machine too."""
DRAWN = "document.documentElement.dataset.drawn"
"""Condition that all charts of a page are drawn."""
CUT = """[...document.querySelectorAll('.plot')].flatMap(plot => {
  const all = plot.getBoundingClientRect();
  return [...plot.querySelectorAll('text')].filter(text => {
    const one = text.getBoundingClientRect();
    return one.width && (one.left < all.left - 1 || one.right > all.right + 1);
  }).map(text => text.textContent);
})"""
"""Script that returns the texts of charts that are cut off."""


@contextmanager
def browser() -> Iterator[Browser]:
    """Start the installed Chromium and end it; skip the test if there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("Chromium is not installed: `apt-get install chromium` on Debian runs the tests of pages in it")
    with sync_playwright() as playwright:
        chrome = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield chrome
        chrome.close()


class Tab:
    """A page in a browser.

    width: of its window, in pixels. dark: whether the system's theme is dark.
    """

    def __init__(self, chrome: Browser, url: str, *, width: int = 1280, dark: bool = False) -> None:
        self.page: Page = chrome.new_page(
            viewport={"width": width, "height": 1000}, color_scheme="dark" if dark else "light"
        )
        self._complaints: list[str] = []
        self.page.on("console", lambda message: self._complaints.append(message.text))
        self.page.on("pageerror", lambda error: self._complaints.append(str(error)))
        self.page.goto(url)

    def run(self, script: str) -> Any:
        """Return the value of a script in the page. Promises are awaited."""
        return self.page.evaluate(script)

    def wait(self, condition: str) -> Any:
        """Wait until an expression is true, and return its value.

        Playwright's `wait_for_function` evaluates texts in the page, which the page's Content Security Policy forbids.
        """
        end = time.monotonic() + SECONDS
        while not (value := self.run(condition)):
            assert time.monotonic() < end, condition
            self.page.wait_for_timeout(50)
        return value

    def press(self, name: str) -> None:
        """Press the button with an id and wait for the charts."""
        self.run(f"delete {DRAWN}; document.getElementById({json.dumps(name)}).click()")
        self.wait(DRAWN)

    def box(self, plot: str) -> tuple[float, float, float, float]:
        """Scroll to a chart, and return left, top, width and height of the part inside its axes."""
        return tuple(
            self.run(
                f"{plot}.scrollIntoView({{block: 'center'}}); (({{x, y, width, height}}) => [x, y, width, height])"
                f"({plot}.querySelector('.nsewdrag').getBoundingClientRect())"
            )
        )

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag the mouse from one point to another."""
        self.page.mouse.move(*start)
        self.page.mouse.down()
        self.page.mouse.move(*end, steps=4)
        self.page.mouse.up()

    def hovered(self, x: float, y: float) -> list[str]:
        """Return the texts that a chart shows at a point."""
        self.page.mouse.move(x - 1, y)
        self.page.mouse.move(x, y)
        self.wait("document.querySelector('.hoverlayer text') !== null")
        return self.run("[...document.querySelectorAll('.hoverlayer text')].map(text => text.textContent)")

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of this page so far."""
        self.run("1")  # events before it have arrived
        return [text for text in self._complaints if "favicon" not in text]


def shown(chrome: Browser, html: str, folder: Path, **more: Any) -> Tab:
    """Return a tab with a page, after its charts were drawn. more: as for `Tab`."""
    (folder / "page.html").write_text(html)
    tab = Tab(chrome, f"file://{folder}/page.html", **more)
    tab.wait(DRAWN)
    return tab
