import re
from pathlib import PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tuner.engines.files import EmittedFile, comment, label


@given(st.lists(st.text(), max_size=4))
@settings(deadline=None, max_examples=40)
def test_a_comment_stays_one_comment_line_per_line_given(lines: list[str]) -> None:
    written = comment(lines)
    # splitlines() also splits at form feeds and Unicode separators, the strictest reader there is.
    assert len(written.splitlines()) == len(lines)
    assert all(line.startswith("#") for line in written.splitlines())


@given(st.text())
@settings(deadline=None, max_examples=40)
def test_a_label_holds_only_what_a_scheduler_allows(text: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,63}", label(text))


@each_row("path", ("/etc/passwd", "../run.sh", "a/../../b"))
def test_a_file_cannot_leave_its_folder(path: str) -> None:
    with pytest.raises(ValueError, match="leaves the folder"):
        EmittedFile(path=PurePosixPath(path), text="")
