"""A browser without a window, by the plain WebDriver protocol: HTTP and JSON, https://www.w3.org/TR/webdriver2/."""

import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WITHOUT = "no Chromium and chromedriver here (on Debian and Ubuntu: apt install chromium chromium-driver)"


def found() -> tuple[str, str] | None:
    """Paths of a Chromium and of its driver, or None."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """`with Browser() as browser: browser.open(file); browser.run("return document.title")`.

    Raises RuntimeError without a browser, or when a script throws.
    """

    def __init__(self, width: int = 1280, height: int = 1000):
        paths = found()
        if paths is None:
            raise RuntimeError(WITHOUT)
        self._folder = tempfile.TemporaryDirectory()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._driver = subprocess.Popen([paths[1], f"--port={port}"], **silent)
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                     f"--window-size={width},{height}", f"--user-data-dir={self._folder.name}"]  # fmt: skip
        chrome = {"binary": paths[0], "args": arguments}
        try:
            self._wait()
            asked = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": chrome}}}
            self._session = f"/session/{self._ask('POST', '/session', asked)['sessionId']}"
        except BaseException:
            self._stop()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                return self._ask("GET", "/status")
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _ask(self, method: str, path: str, body: dict | None = None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, address: str | Path) -> None:
        url = address.resolve().as_uri() if isinstance(address, Path) else address
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments):
        """What `script`, a function's body in JavaScript, returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, wherever the focus is; WebDriver has codes for those without a letter."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("POST", f"{self._session}/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def click(self, selector: str) -> None:
        element = self._ask("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        self._ask("POST", f"{self._session}/element/{next(iter(element.values()))}/click", {})

    def theme(self, dark: bool) -> None:
        """What the page is told when it asks for the system's colours."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        body = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": [feature]}}
        self._ask("POST", f"{self._session}/goog/cdp/execute", body)

    def screenshot(self) -> str:
        """A PNG in base64."""
        return self._ask("GET", f"{self._session}/screenshot")

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self._stop()

    def _stop(self) -> None:
        try:
            if hasattr(self, "_session"):
                self._ask("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait()
            self._folder.cleanup()
