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

from tuner.environment import BROWSERS
from tuner.errors import EnvironmentMissingError

MOST_S: Final = 120.0
"""That a browser may take for one picture."""
VIRTUAL_S: Final = 5.0
"""Of the page's own clock, in which plots are drawn."""
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
    # A browser of its own accord asks its maker for updates and the time: no name is found.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def browser_path(which: Callable[[str], str | None] = shutil.which) -> str:
    """Return the first browser that is installed.

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
    """Return the command that opens a page; root has no sandbox to run in."""
    return [
        browser,
        *QUIET,
        *(("--no-sandbox",) if is_root else ()),
        f"--user-data-dir={scratch}",
        f"--virtual-time-budget={round(VIRTUAL_S * 1000)}",
        *switches,
        page.as_uri(),
    ]


def picture(page: str, *, width: int = WIDTH, height: int | None = None) -> bytes:
    """Return the whole page as a PNG.

    Args:
        page: the HTML.
        width: of the window, in pixels.
        height: of the window; None: as long as the page is.

    Raises:
        EnvironmentMissingError: there is no Chromium, or it fails.
    """
    browser = browser_path()
    with tempfile.TemporaryDirectory(prefix="moetune-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        file, out = folder / "report.html", folder / "report.png"
        file.write_text(page, encoding="utf-8")

        def opened(*switches: str) -> str:
            return _run(browser, file, scratch=folder / "profile", switches=switches)

        if height is None:
            height = _height(opened(f"--window-size={width},1000", "--dump-dom"))
        opened(f"--window-size={width},{height}", f"--screenshot={out}")
        if not out.is_file():
            raise EnvironmentMissingError(
                f"{browser} drew no picture; try it by hand on the page of --format html"
            )
        return out.read_bytes()


def _run(browser: str, file: Path, *, scratch: Path, switches: Sequence[str]) -> str:
    """Open the page once and return what the browser prints."""
    asked = command(browser, file, scratch=scratch, switches=switches, is_root=os.geteuid() == 0)
    try:
        done = subprocess.run(
            asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=MOST_S, check=False
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
    """Return how long the page says it is, in pixels."""
    found = re.search(r'<html[^>]* data-height="(\d{1,6})"', dom)
    if found is None:
        raise EnvironmentMissingError(
            "the browser did not draw the page in time; write --format html instead"
        )
    return min(MOST_HEIGHT, max(400, int(found[1])))
