"""A headless Chromium by its DevTools pipe: pages opened at a width and in a colour scheme.

A window of a headless Chromium is 500 pixels wide or more; the protocol's device metrics are not.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-pipe",
)  # fmt: skip
#: makes two inherited pipes 3 and 4, and becomes the browser
START = """
import os, sys
os.dup2(int(sys.argv[1]), 3), os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
TIMEOUT_S = 60.0


def chromium() -> str | None:
    """The program, as Debian and others name it."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """A Chromium with one page; ``with Browser(profile) as browser``.

    Args:
        profile: a new, empty folder.
    """

    def __init__(self, profile: Path) -> None:
        program = chromium()
        assert program is not None
        pipes = (os.pipe(), os.pipe())
        (to_browser, self._write), (self._read, from_browser) = pipes
        # above 3 and 4, from which the browser reads and to which it writes
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
        self._process = subprocess.Popen(
            [
                sys.executable, "-c", START, *map(str, theirs),
                program, *FLAGS, f"--user-data-dir={profile}", "about:blank",
            ],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (to_browser, from_browser, *theirs):
            os.close(end)
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self.messages: list[str] = []  # errors and what the page wrote to the console

    def __enter__(self) -> Browser:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(TIMEOUT_S)
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **params: Any) -> Any:
        """The answer to a method of the protocol; events on the way are kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, path: Path, width: int, scheme: str) -> None:
        """Load a file; returns when it is there and laid out."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self._loaded = False
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._next()
        assert self.run(f"matchMedia('(prefers-color-scheme: {scheme})').matches")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path, height: int) -> None:
        """The page's upper part as a PNG."""
        clip = {"x": 0, "y": 0, "width": self.run("innerWidth"), "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium said nothing for {TIMEOUT_S:g} s"
            data = os.read(self._read, 1 << 16)
            assert data, "Chromium has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Log.entryAdded":
            self.messages.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.messages.append(json.dumps(params))
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "about:")):
                self.messages.append(f"asked for {url}")
        return message


def main(page: str, picture: str, width: str, height: str, scheme: str) -> None:
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        browser.open(Path(page).resolve(), int(width), scheme)
        browser.screenshot(Path(picture), int(height))


if __name__ == "__main__":  # python tests/browser.py PAGE.html PICTURE.png 1280 3000 light
    main(*sys.argv[1:])
