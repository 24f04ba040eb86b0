"""Pages in headless Chromium, where it is installed, driven by its DevTools protocol through pipes."""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
)
SECONDS = 60.0
"""Seconds that an answer or a condition may take, on a busy machine too."""


def chromium() -> str:
    """Return the path of Chromium; skip the test if there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("Chromium is not installed: `apt-get install chromium` on Debian runs the tests of pages in it")
    return found


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


class Browser:
    """Chromium that runs.

    send, receive: file descriptors of its pipes.
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._number, self._rest = send, receive, 0, b""
        self.messages: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result; events before it are kept in `messages`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._send, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.messages.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._receive], [], [], SECONDS)[0], "Chromium does not answer"
            read = os.read(self._receive, 1 << 20)
            assert read, "Chromium has ended"
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def open(self, url: str, *, width: int = 1280, dark: bool = False) -> "Tab":
        """Return a new tab with a page, after it has loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        tab = Tab(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[theme])
        tab.call("Page.navigate", url=url)
        tab.wait(f"location.href !== 'about:blank' && document.readyState === 'complete' && {json.dumps(url)}")
        return tab


class Tab:
    """A tab of a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol."""
        return self._browser.call(method, self._session, **parameters)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page. Promises are awaited."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + SECONDS
        while not (value := self.run(condition)):
            assert time.monotonic() < end, condition
            time.sleep(0.05)
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
        (x, y), (to_x, to_y) = start, end
        self.mouse("Moved", x, y)
        self.mouse("Pressed", x, y, 1)
        for step in range(1, 5):
            self.mouse("Moved", x + (to_x - x) * step / 4, y + (to_y - y) * step / 4, 1)
        self.mouse("Released", to_x, to_y, 1)

    def hovered(self, x: float, y: float) -> list[str]:
        """Return the texts that a chart shows at a point."""
        for move in (-1, 0):
            self.mouse("Moved", x + move, y)
        self.wait("document.querySelector('.hoverlayer text') !== null")
        return self.run("[...document.querySelectorAll('.hoverlayer text')].map(text => text.textContent)")

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        """Send an event of the mouse: moved, pressed or released, with the left button if there are clicks."""
        button = {"button": "left", "buttons": 1, "clickCount": clicks} if clicks else {}
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **button)

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of this page so far."""
        self.run("1")  # events before it have arrived
        mine = [one for one in self._browser.messages if one.get("sessionId") == self._session]
        texts = [one["params"]["entry"]["text"] for one in mine if one["method"] == "Log.entryAdded"]
        texts += [str(one["params"]["args"]) for one in mine if one["method"] == "Runtime.consoleAPICalled"]
        texts += [str(one["params"]) for one in mine if one["method"] == "Runtime.exceptionThrown"]
        return [text for text in texts if "favicon" not in text]


def shown(chrome: Browser, html: str, folder: Path, **more: Any) -> Tab:
    """Return a tab with a page, after its charts were drawn. more: as for `Browser.open`."""
    (folder / "page.html").write_text(html)
    tab = chrome.open(f"file://{folder}/page.html", **more)
    tab.wait(DRAWN)
    return tab


@contextmanager
def browser(profile: Path, options: Sequence[str] = OPTIONS) -> Iterator[Browser]:
    """Start Chromium and end it. profile: folder for its files."""
    path = chromium()
    theirs, send = os.pipe()
    receive, answers = os.pipe()

    def connect() -> None:
        """Chromium reads from descriptor 3 and writes to 4."""
        copies = os.dup(theirs), os.dup(answers)
        os.dup2(copies[0], 3)
        os.dup2(copies[1], 4)

    process = subprocess.Popen(
        [path, *options, f"--user-data-dir={profile}"],
        preexec_fn=connect,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    os.close(answers)
    try:
        yield Browser(send, receive)
    finally:
        os.close(send)
        os.close(receive)
        process.terminate()
        process.wait()
