"""A page as one PNG, drawn by an installed Chromium without network.

The browser runs headless in a profile folder of its own, gets the page as a file, and is stopped
after a while. Its switches are Chromium's own (https://peter.sh/experiments/chromium-command-line-switches/).
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tuner.errors import EnvironmentMissingError

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""Any of these renders the page of `moetune report`."""
MOST_S: Final = 120.0
"""Seconds that a browser may take for one picture."""
VIRTUAL_S: Final = 5.0
"""Seconds of the page's virtual clock for drawing plots."""
WIDTH: Final = 1200
MOST_HEIGHT: Final = 16_000
"""Pixels; Chromium draws no taller texture in software (2 to the 14 less some)."""

QUIET: Final = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    # Browsers contact their vendor for updates and the time: resolve no names.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def browser_path(which: Callable[[str], str | None] = shutil.which) -> str:
    """Return the first installed browser.

    Raises:
        EnvironmentMissingError: there is none.
    """
    for name in BROWSERS:
        path = which(name)
        if path is not None:
            return path
    raise EnvironmentMissingError(
        "no Chromium on this machine, which draws the picture: apt-get install chromium, or write "
        "--format html and print it from a browser"
    )


def command(
    browser: str, page: Path, *, scratch: Path, switches: Sequence[str], is_root: bool
) -> list[str]:
    """Return the command that opens a page; root cannot use the sandbox."""
    return [
        browser,
        *QUIET,
        *(("--no-sandbox",) if is_root else ()),
        f"--user-data-dir={scratch}",
        f"--virtual-time-budget={round(VIRTUAL_S * 1000)}",
        *switches,
        page.as_uri(),
    ]


def picture(page: str, *, width: int = WIDTH) -> bytes:
    """Return the whole page as a PNG.

    Args:
        page: the HTML.
        width: of the window, in pixels.

    Raises:
        EnvironmentMissingError: there is no Chromium, or it fails.
    """
    browser = browser_path()
    with tempfile.TemporaryDirectory(prefix="moetune-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        file, out = folder / "report.html", folder / "report.png"
        file.write_text(page, encoding="utf-8")

        def run_page(*switches: str) -> str:
            return _run(browser, file, scratch=folder / "profile", switches=switches)

        height = _height(run_page(f"--window-size={width},1000", "--dump-dom"))
        run_page(f"--window-size={width},{height}", f"--screenshot={out}")
        if not out.is_file():
            raise EnvironmentMissingError(
                f"{browser} drew no picture; try it by hand on the page of --format html"
            )
        return out.read_bytes()


def _run(browser: str, file: Path, *, scratch: Path, switches: Sequence[str]) -> str:
    """Open the page once and return what the browser prints."""
    arguments = command(
        browser, file, scratch=scratch, switches=switches, is_root=os.geteuid() == 0
    )
    try:
        done = subprocess.run(
            arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=MOST_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentMissingError(
            f"{browser} took over {MOST_S:.0f} s for a picture; write --format html instead"
        ) from error
    if done.returncode != 0:
        raise EnvironmentMissingError(
            f"{browser} ended with code {done.returncode}; write --format html instead"
        )
    return done.stdout.decode(errors="replace")


def _height(dom: str) -> int:
    """Return the page's height, in pixels."""
    match = re.search(r'<html[^>]* data-height="(\d{1,6})"', dom)
    if match is None:
        raise EnvironmentMissingError(
            "the browser did not draw the page in time; write --format html instead"
        )
    return min(MOST_HEIGHT, max(400, int(match[1])))
