"""A headless browser, driven through its own DevTools protocol: for tests of the page and for its pictures.

Needs Debian's `chromium` (or another Chromium on the path), and nothing from the network.

    with Browser() as browser:
        tab = browser.open("http://127.0.0.1:8000/", width=1440, height=900)
        tab.wait_until("document.title.includes('Quire')")
"""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from websockets.sync.client import ClientConnection, connect

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ADDRESS = re.compile(r"DevTools listening on (ws://\S+)")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    "--force-color-profile=srgb", "--remote-debugging-port=0", "--remote-allow-origins=*",
)  # fmt: skip
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}


def path_of_browser() -> str | None:
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class Browser:
    """One process with a profile of its own, both gone after the `with`."""

    def __init__(self) -> None:
        path = path_of_browser()
        assert path is not None, f"none of {', '.join(_NAMES)} is installed"
        self._profile = tempfile.TemporaryDirectory(prefix="quire-browser-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [path, *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._open = ExitStack()
        self._socket: ClientConnection = self._open.enter_context(
            connect(self._address(), max_size=None, open_timeout=60, ping_interval=None)
        )
        self._numbers = itertools.count(1)
        self._tabs: dict[str, Tab] = {}

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Tab:
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        tab.set_scheme(dark=dark)
        tab.go(url)
        return tab

    def call(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params or {}}
        self._socket.send(json.dumps(message if session is None else {**message, "sessionId": session}))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            tab = self._tabs.get(answer.get("sessionId", ""))
            if tab is not None and "method" in answer:
                tab.note(answer["method"], answer["params"])

    def _address(self) -> str:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := _ADDRESS.search(line):
                return found[1]
        raise AssertionError(f"the browser ended with status {self._process.wait()} before it could be driven")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._profile.cleanup()


class Tab:
    """One page. `complaints` holds errors of its scripts, of its console and of what it loads."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []
        # addresses that were asked for
        self.requested: list[str] = []

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        return self._browser.call(method, params, self._session)

    def close(self) -> None:
        self.call("Page.close")

    def note(self, method: str, params: dict[str, Any]) -> None:
        """An event of the protocol."""
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.complaints.append(str([one.get("value", one.get("description")) for one in params["args"]]))
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    # ------------------------------------------------------------------------------------------ what is there

    def go(self, url: str) -> None:
        self.call("Page.navigate", {"url": url})

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, as JSON; a promise is waited for."""
        params = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", params)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait_until(self, condition: str, seconds: float = 60.0) -> Any:
        """The first value of the expression that counts as true."""
        end = time.monotonic() + seconds
        # before the page is there, its elements are not
        found = f"const found = {condition}; return found instanceof Node ? true : found"
        safely = f"(() => {{ try {{ {found} }} catch {{ return false }} }})()"
        while not (value := self.evaluate(safely)):
            assert time.monotonic() < end, f"{condition} did not come true; the page says {self.complaints}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    # ------------------------------------------------------------------------------------------ what a user does

    def resize(self, width: int, height: int) -> None:
        params = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", params)

    def set_scheme(self, *, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [feature]})

    def type(self, text: str) -> None:
        self.call("Input.insertText", {"text": text})

    def press(self, key: str) -> None:
        """A key by its name, where the focus is."""
        params = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        letter = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", {"type": "keyDown", **params, **letter})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **params})

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is seen, or of the whole page."""
        content = self.call("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(content["data"]))
