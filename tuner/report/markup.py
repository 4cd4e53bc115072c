"""HTML from values, so that no text of a user can become markup.

    Fragment   markup that is known to be well-formed; the only way to one from text is `element`
    element    one element; children that are plain text are escaped, and so is every attribute
    data_script  JSON inside a script element that no string of the data can leave

Characters that a page must not hold (control codes, halves of surrogate pairs) and those that
reorder what is read (Unicode's bidirectional controls, the "Trojan source" of CVE-2021-42574)
become U+FFFD.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Final

VOID: Final = frozenset({"meta", "link", "input", "br", "hr"})
"""Elements that have no end tag (HTML Living Standard, 13.1.2)."""

_UNFIT: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)
_REPLACEMENT: Final = "\ufffd"


@dataclass(frozen=True, slots=True)
class Fragment:
    """Markup, not text."""

    html: str


Child = Fragment | str
Attributes = Mapping[str, str | bool]


def readable(text: str) -> str:
    """Return the text with what a page must not hold replaced."""
    return _UNFIT.sub(_REPLACEMENT, text)


def element(tag: str, /, *children: Child, **attributes: str | bool) -> Fragment:
    """Return one element.

    Args:
        tag: its name.
        children: fragments as they are, texts escaped.
        attributes: by name, underscores for hyphens and one at the end dropped (`class_`); True
            stands alone, False is left out.
    """
    head = tag + "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in VOID:
        return Fragment(f"<{head}>")
    return Fragment(f"<{head}>{joined(*children).html}</{tag}>")


def joined(*children: Child) -> Fragment:
    """Return fragments and texts one after another."""
    return Fragment(
        "".join(
            child.html if isinstance(child, Fragment) else escape(readable(child))
            for child in children
        )
    )


def data_script(values: object, *, name: str) -> Fragment:
    """Return a script element that holds data; `<`, `>`, `&` and line separators are escaped."""
    text = json.dumps(values, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    # ensure_ascii already writes U+2028 and U+2029 as escapes.
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Fragment(f'<script type="application/json" id="{escape(name)}">{text}</script>')


def _attribute(name: str, value: str | bool) -> str:
    if value is False:
        return ""
    shown = name.rstrip("_").replace("_", "-")
    return f" {shown}" if value is True else f' {shown}="{escape(readable(value))}"'
