import struct
from pathlib import Path

import pytest

from tuner.errors import EnvironmentMissingError
from tuner.report.picture import browser_path, command, picture


def test_without_a_browser_the_message_says_what_to_do() -> None:
    with pytest.raises(EnvironmentMissingError, match="apt-get install chromium") as raised:
        browser_path(lambda _: None)
    assert raised.value.exit_code == 3


def test_the_first_browser_that_is_installed_is_taken() -> None:
    found = {"google-chrome": "/opt/chrome", "chromium-browser": "/usr/bin/chromium-browser"}
    assert browser_path(found.get) == "/usr/bin/chromium-browser"


def test_only_root_runs_without_a_sandbox(tmp_path: Path) -> None:
    def switches(*, is_root: bool) -> list[str]:
        page = tmp_path / "report.html"
        return command("chromium", page, scratch=tmp_path, switches=("--x",), is_root=is_root)

    assert "--no-sandbox" in switches(is_root=True)
    assert "--no-sandbox" not in switches(is_root=False)
    assert switches(is_root=False)[-2:] == ["--x", (tmp_path / "report.html").as_uri()]


def test_a_page_becomes_a_picture_of_its_own_height(browser: str) -> None:
    assert browser
    page = (
        "<!DOCTYPE html><body style='margin:0;background:#00f;height:900px'><script>"
        "document.documentElement.dataset.height = document.documentElement.scrollHeight"
        "</script></body>"
    )
    drawn = picture(page, width=640)
    assert drawn[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", drawn[16:24]) == (640, 900)


def test_a_page_that_is_never_drawn_is_an_error(browser: str) -> None:
    assert browser
    with pytest.raises(EnvironmentMissingError, match="did not draw the page in time"):
        picture("<!DOCTYPE html><p>no script</p>")
