import json
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.report.markup import Fragment, data_script, element, joined, readable

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;"


class _Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def seen(fragment: Fragment) -> _Seen:
    reader = _Seen()
    reader.feed(fragment.html)
    reader.close()
    return reader


def test_a_child_that_is_text_stays_text() -> None:
    page = seen(element("p", HOSTILE, element("b", "bold")))
    assert page.tags == ["p", "b"]
    assert "".join(page.texts) == HOSTILE + "bold"


def test_an_attribute_cannot_be_left() -> None:
    page = seen(element("div", title=HOSTILE))
    assert page.tags == ["div"]
    assert page.attributes == [("title", HOSTILE)]


def test_boolean_attributes_have_no_value() -> None:
    assert element("details", open=True, hidden=False).html == "<details open></details>"
    assert element("meta", http_equiv="x").html == '<meta http-equiv="x">'


def test_data_cannot_leave_its_script() -> None:
    values = {"name": HOSTILE, "separators": "\u2028\u2029", "comment": "<!--<script>"}
    script = data_script(values, name="figures")
    page = seen(script)
    assert page.tags == ["script"]
    assert json.loads("".join(page.texts)) == values
    assert "\u2028" not in script.html
    assert "<!--" not in script.html


def test_a_number_that_json_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        data_script([float("nan")], name="figures")


@settings(deadline=None, max_examples=100)
@given(text=st.text())
def test_no_text_makes_an_element(text: str) -> None:
    page = seen(element("p", text))
    assert page.tags == ["p"]
    assert "".join(page.texts).replace("\r", "\n") == readable(text).replace("\r", "\n")


def test_what_reorders_or_ends_text_is_replaced() -> None:
    assert joined("a\u202eb\x00c\ud800").html == "a\ufffdb\ufffdc\ufffd"
    assert readable("tab\tand\nline, é, 模型") == "tab\tand\nline, é, 模型"
