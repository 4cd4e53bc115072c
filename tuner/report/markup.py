"""HTML from values; text from users is always escaped.

    Fragment   well-formed markup; made from text by `element` only
    element    one element; text children and attributes are escaped
    data_script  JSON inside a script element, escaped so that no string can end it

Invalid characters (control codes, lone surrogates) and those that reorder text (Unicode's
bidirectional controls, the "Trojan source" of CVE-2021-42574) become U+FFFD.
"""

import json
import re
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


def readable(text: str) -> str:
    """Return the text with invalid characters replaced."""
    return _UNFIT.sub(_REPLACEMENT, text)


def element(tag: str, /, *children: Child, **attributes: str | bool) -> Fragment:
    """Return one element.

    Args:
        tag: its name.
        children: fragments unchanged, texts escaped.
        attributes: by name, underscores for hyphens and one at the end dropped (`class_`); True
            has no value, False is left out.
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
