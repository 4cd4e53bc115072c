"""The page in a real browser: everything is drawn, nothing complains, nothing is fetched."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.expect import contains, present
from tests.rows import each_row
from tuner.goals.registry import goal_of_folder
from tuner.report.page import page_html
from tuner.report.picture import command
from tuner.report.written import plotly_script

Parsed = Callable[[str], Any]
Shown = Callable[[str], Any]
KINDS = ("verified", "train", "serve", "place")
QUIET_S = 120.0
ASKED = re.compile(
    r'"initiator":"(?!not an origin")[^"]*"[^\n]{0,1000}?"url":"(?:https?|wss?|ftp)://([^/"]*)'
)
"""A host in the log of a request that a page starts; a browser's own have no origin."""


def opened(
    browser: str, page: Path, *, scratch: Path, switches: Sequence[str] = ()
) -> tuple[str, list[str], set[str]]:
    """Return the drawn document, what the console said, and the hosts that the page asked."""
    log = scratch / "net.json"
    browser_command = command(
        browser,
        page,
        scratch=scratch / "profile",
        switches=(
            "--enable-logging=stderr",
            f"--log-net-log={log}",
            "--window-size=1200,900",
            *switches,
            "--dump-dom",
        ),
        is_root=os.geteuid() == 0,
    )
    done = subprocess.run(browser_command, capture_output=True, timeout=QUIET_S, check=True)
    said = [line for line in done.stderr.decode().splitlines() if ":CONSOLE" in line]
    text = log.read_text(encoding="utf-8")
    return done.stdout.decode(), said, set(ASKED.findall(text))


def write_page(folder: Path, out: Path) -> int:
    """Write the page of a plan and return how many plots it has."""
    report = goal_of_folder(folder).report(folder)
    out.write_text(page_html(report, plotly_script()), encoding="utf-8")
    return len(report.figures)


def test_what_a_page_asks_the_network_is_seen(browser: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(
        "<!DOCTYPE html><img src='http://127.0.0.1:9/image'>"
        "<script>fetch('http://localhost:9/data').catch(() => 0)</script>"
    )
    _, _, hosts = opened(browser, file, scratch=tmp_path)
    assert hosts == {"127.0.0.1:9", "localhost:9"}


@pytest.mark.slow
@each_row("kind", KINDS)
def test_every_plot_is_drawn_without_a_word_and_without_network(
    shown: Shown, browser: str, tmp_path: Path, parsed: Parsed, kind: str
) -> None:
    scratch = tmp_path / kind
    scratch.mkdir()
    count = write_page(shown(kind).folder, scratch / "report.html")
    dom, said, hosts = opened(browser, scratch / "report.html", scratch=scratch)
    assert said == []
    assert hosts == set()
    page = parsed(_without_scripts(dom))
    (root,) = page.all("html")
    assert root.attributes["data-drawn"] == str(count)
    for plot in page.all("div"):
        if "plot" in plot.attributes.get("class", "").split():
            marks = [node for node in plot.all() if node.tag in ("path", "rect", "image")]
            assert plot.all("svg"), plot.attributes["id"]
            assert len(marks) > 10, plot.attributes["id"]


def test_a_hostile_name_changes_nothing(
    serve_folder: Path, browser: str, tmp_path: Path, copied: Callable[[Path], Path]
) -> None:
    hostile = "</script><script>document.title='owned'</script><img src=x onerror=document.title=1>"
    folder = copied(serve_folder)
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    plan["model"]["name"] = hostile
    plan["predicted"]["breakdown_s"] = {hostile: 0.01, "<a href='https://evil.example'>x</a>": 0.02}
    plan["binding_constraint"] = hostile
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    (folder / "launch" / "vllm" / "run.sh").write_text(hostile, encoding="utf-8")
    file = tmp_path / "report.html"
    count = write_page(folder, file)
    dom, said, hosts = opened(browser, file, scratch=tmp_path)
    assert said == []
    assert hosts == set()
    assert f'data-drawn="{count}"' in dom
    assert "<img" not in _without_scripts(dom)
    assert "evil.example'" not in re.findall(r'href="[^"]*"', dom)
    assert re.findall(r"<title>([^<]*)", dom)[0].startswith("&lt;/script&gt;")


@each_row("kind", KINDS)
def test_nothing_is_wider_than_a_phone(
    shown: Shown, browser: str, tmp_path: Path, kind: str
) -> None:
    scratch = tmp_path / kind
    scratch.mkdir()
    write_page(shown(kind).folder, scratch / "report.html")
    # No window is as narrow as a phone; a frame is.
    frame = scratch / "frame.html"
    frame.write_text(
        "<!DOCTYPE html><iframe style='width:390px;height:800px' src='report.html'></iframe>"
        "<script>addEventListener('load', () => setTimeout(() => {"
        " const inside = document.querySelector('iframe').contentDocument.documentElement;"
        " document.documentElement.dataset.found = inside.dataset.drawn + ' ' + inside.scrollWidth;"
        "}, 3000))</script>",
        encoding="utf-8",
    )
    dom, said, _ = opened(
        browser, frame, scratch=scratch, switches=("--allow-file-access-from-files",)
    )
    assert said == []
    found = present(re.search(r'data-found="(\d+) (\d+)"', dom))
    assert int(found[1]) > 0
    assert int(found[2]) <= 390


def test_a_dark_page_is_drawn_in_its_own_ink(
    train_folder: Path, browser: str, tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    count = write_page(train_folder, file)
    dark, said, _ = opened(
        browser, file, scratch=tmp_path, switches=("--blink-settings=preferredColorScheme=0",)
    )
    assert said == []
    contains(dark, f'data-drawn="{count}"', "rgb(230, 234, 239)")


def test_a_page_is_printed(train_folder: Path, browser: str, tmp_path: Path) -> None:
    file, out = tmp_path / "report.html", tmp_path / "report.pdf"
    write_page(train_folder, file)
    browser_command = command(
        browser,
        file,
        scratch=tmp_path / "printing",
        switches=(f"--print-to-pdf={out}", "--no-pdf-header-footer"),
        is_root=os.geteuid() == 0,
    )
    subprocess.run(browser_command, capture_output=True, timeout=QUIET_S, check=True)
    assert out.read_bytes().startswith(b"%PDF")


def _without_scripts(dom: str) -> str:
    return re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)
