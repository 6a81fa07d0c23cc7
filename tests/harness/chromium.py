# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium for tests, driven over its debugging pipe.

Nothing is downloaded and no port is opened: messages of the DevTools
protocol go through two file descriptors, each ended by a NUL. Every wait is
bounded; the browser's folder is the test's own.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    """The browser's program, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a fresh browser; use it in a `with` block."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900,
                 dark: bool = False) -> None:
        program = find()
        assert program is not None
        folder.mkdir(parents=True, exist_ok=True)
        to_browser, from_browser = os.pipe(), os.pipe()
        self._errors = (folder / "chromium.log").open("wb")

        def fds() -> None:
            # The browser reads descriptor 3 and writes 4. They are moved out
            # of the way first, since a pipe may be one of the two already.
            read, write = os.dup(to_browser[0]), os.dup(from_browser[1])
            spare_read, spare_write = os.dup(read), os.dup(write)
            os.dup2(spare_read, 3)
            os.dup2(spare_write, 4)

        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--no-first-run", "--no-proxy-server",
             "--disable-background-networking", "--disable-sync",
             "--disable-component-update", "--hide-scrollbars",
             f"--window-size={width},{height}", "--remote-debugging-pipe",
             f"--user-data-dir={folder / 'profile'}", "about:blank"],
            preexec_fn=fds, close_fds=False, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=self._errors,
            stderr=self._errors)
        os.close(to_browser[0])
        os.close(from_browser[1])
        self._out, self._in = to_browser[1], from_browser[0]
        self._buffer = b""
        self._next = 0
        self._session: str | None = None
        self.console: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target,
                                  flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width,
                  height=height, deviceScaleFactor=1, mobile=False)
        if dark:
            self.call("Emulation.setEmulatedMedia", features=[
                {"name": "prefers-color-scheme", "value": "dark"}])

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("the browser ended")
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Log.entryAdded":
            self.console.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Page.javascriptDialogOpening":
            self.console.append("dialog: " + params["message"])

    def call(self, method: str, timeout: float = 30, **params: Any) -> Any:
        """One command of the protocol and its result."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            reply = self._message(deadline)
            if reply.get("id") == self._next:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]

    def open(self, url: str) -> None:
        """Goes there and waits until all of the page is there."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && "
                      "location.protocol !== 'about:'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        done = self.call("Runtime.evaluate", expression=script,
                         returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def text(self) -> str:
        """What a reader sees of the page."""
        return self.evaluate("document.body ? document.body.innerText : ''")

    def wait_for(self, condition: str, timeout: float = 20) -> None:
        """Until the expression is true in the page."""
        deadline = time.monotonic() + timeout
        while not self.evaluate(condition):
            if time.monotonic() > deadline:
                raise AssertionError(f"never: {condition}\n{self.text()[:2000]}"
                                     f"\n{self.console}")
            time.sleep(0.05)

    def key(self, name: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            more = {"text": "\r"} if name == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name,
                      windowsVirtualKeyCode=code, **more)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def accessible(self) -> list[tuple[str, str]]:
        """Role and name of every node that assistive programs are told of."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [(n["role"]["value"], n.get("name", {}).get("value", ""))
                for n in nodes if not n.get("ignored")]

    def screenshot(self, path: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"],
                "height": min(size["height"], 4000), "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip,
                         captureBeyondViewport=True)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        # Its helpers are of its own session and go with it.
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(20)
        os.close(self._out)
        os.close(self._in)
        self._errors.close()


def main() -> int:
    """chromium.py URL FILE: a picture of the page once its data is there."""
    url, file = sys.argv[1:]
    if find() is None:
        print("no chromium: no picture")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        with Browser(Path(folder)) as browser:
            browser.open(url)
            browser.wait_for(
                "document.getElementById('data')?.hidden === false")
            browser.screenshot(Path(file))
    print(f"picture of {url}: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
