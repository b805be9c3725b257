"""A real headless Chromium, driven over WebDriver with nothing but the standard library."""

import base64
import json
import shutil
import subprocess
import urllib.request
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser:
    """Drive one window; `profile` is a new empty directory."""

    def __init__(self, profile: Path):
        self.driver = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            self.url = self._begin(profile)
        except BaseException:
            self._end()
            raise

    def _begin(self, profile: Path) -> str:
        started = (line for line in self.driver.stdout if "started successfully on port" in line)
        port = next(started).rstrip().rstrip(".").rpartition(" ")[2]
        self.url = f"http://127.0.0.1:{port}/session"
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        found = self._post("", {"capabilities": {"alwaysMatch": wanted}})
        return f"{self.url}/{found['sessionId']}"

    def _end(self) -> None:
        self.driver.terminate()
        self.driver.wait(timeout=20)
        self.driver.stdout.close()

    def close(self) -> None:
        try:
            self._call("DELETE", "", None)
        finally:
            self._end()

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page at a size and with the system's preference for colours."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])
        self.log("browser"), self.log("performance")  # what earlier pages left
        self._post("/url", {"url": url})

    def run(self, script: str, *arguments):
        """Return the value of `return ...` in the page."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, key: str) -> None:
        """Press a key on whatever has the focus; "\ue007" is Enter in WebDriver's alphabet."""
        strokes = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._post("/actions", {"actions": [{"type": "key", "id": "k", "actions": strokes}]})

    def click(self, selector: str) -> None:
        """Click in the middle of the first match, as a hand does."""
        found = self._post("/element", {"using": "css selector", "value": selector})
        self._post(f"/element/{next(iter(found.values()))}/click", {})

    def log(self, kind: str) -> list[dict]:
        """Return what console ("browser") or DevTools ("performance") said since the last call."""
        entries = self._post("/se/log", {"type": kind})
        if kind == "performance":
            return [json.loads(entry["message"])["message"] for entry in entries]
        return entries

    def requests(self) -> list[str]:
        """Return every address that the page asked for since it was opened."""
        sent = [e for e in self.log("performance") if e["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def screenshot(self, path: Path, full: bool = False) -> None:
        found = self.devtools("Page.captureScreenshot", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(found["data"]))

    def devtools(self, command: str, **parameters):
        return self._post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _post(self, path: str, body: dict):
        return self._call("POST", path, json.dumps(body).encode())

    def _call(self, method: str, path: str, body: bytes | None):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, body, headers, method=method)
        # No proxy of the environment may come between us and the driver.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as answer:
            return json.load(answer)["value"]
