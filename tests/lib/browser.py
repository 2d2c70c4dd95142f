"""A real browser without a window, for the pages that distboot writes: what it shows, asks for and complains of."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
# As root, without a GPU, and without asking its maker for anything.
_FLAGS = (
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "disable-dev-shm-usage",
    "hide-scrollbars",
)


def missing_for_browser() -> str | None:
    if CHROMIUM is None or DRIVER is None:
        return "not installed: chromium, chromium-driver (see tests/cluster/packages.txt)"
    return None if find_spec("selenium") else "not installed: selenium"


class Browser:
    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def open(
        self,
        page: Path,
        width: int = 1280,
        height: int = 900,
        *,
        dark: bool = False,
        on_paper: bool = False,
    ) -> None:
        """Open a file in a window of this size; what was logged before is forgotten."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        media = {"media": "print" if on_paper else "screen", "features": [scheme]}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.complaints(), self.requests()
        self._driver.get(page.resolve().as_uri())

    def run(self, script: str) -> Any:
        """What a function body in JavaScript returns."""
        return self._driver.execute_script(script)

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.run(
            f"return [...document.querySelectorAll({selector!r})].map(one => one.innerText)"
        )
        return found

    def complaints(self) -> list[str]:
        """What stands in its console since the last time."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def requests(self) -> list[str]:
        events = [
            json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance")
        ]
        return [
            one["params"]["request"]["url"]
            for one in events
            if one["method"] == "Network.requestWillBeSent"
        ]

    def picture(self, file: Path) -> None:
        self._driver.save_screenshot(str(file))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile in a folder, ended when the block ends."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*_FLAGS, f"user-data-dir={folder}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
