"""Settings in the manner of Hydra and OmegaConf: nested YAML, interpolations, and overrides.

    overrides        key.of.section=value, with + or ++ before what the configuration lacks
    interpolations   ${a.b}, ${oc.select:a.b,default} and ${mul:a,b} are resolved; a setting with
                     any other counts as not set

Not covered: config groups but for their names, relative interpolations, lists of overrides.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tuner.errors import SpecError
from tuner.spec.yaml_text import parse_documents, parse_yaml

Values = dict[str, Any]
_OVERRIDE: Final = re.compile(r"(?:\+{0,2})([A-Za-z_][\w.-]{0,200})=(.*)", re.DOTALL)
_SELECT: Final = re.compile(
    r"\$\{(?:oc\.select:)?\s*([A-Za-z_][\w.]{0,200})\s*(?:,\s*([^${}]*))?\}"
)
_PRODUCT: Final = re.compile(r"\$\{mul:\s*(\d{1,12})\s*,\s*(\d{1,12})\s*\}")
_PLACEHOLDER: Final = re.compile(r"[$`]")
_DEEPEST: Final = 6
"""Interpolations that refer to interpolations, sections within one another."""


def override_values(words: Sequence[str]) -> tuple[Values, tuple[str, ...]]:
    """Return the settings of a command's overrides, and those whose value only a shell knows."""
    values: Values = {}
    unknown = []
    for word in words:
        match = _OVERRIDE.fullmatch(word)
        if match is None or word.startswith("-"):
            continue
        if _PLACEHOLDER.search(match[2]) and "${" not in match[2]:
            unknown.append(match[1])
        else:
            set_value(values, match[1], scalar(match[2]))
    return values, tuple(unknown)


def scalar(text: str) -> Any:
    """Return the value of an override as YAML has it; what is no YAML stays text."""
    try:
        value = parse_yaml(text, source="")
    except SpecError:
        return text
    # YAML 1.1 leaves numbers such as 1e-6 to be text.
    return float(value) if isinstance(value, str) and re.fullmatch(r"\d+e-?\d+", value) else value


def set_value(values: Values, name: str, value: Any) -> None:
    """Set a setting by its dotted name."""
    *sections, key = name.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            inner = values[section] = {}
        values = inner
    values[key] = value


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Values:
    """Return settings with others over them, section by section."""
    both = dict(base)
    for key, value in over.items():
        below = both.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = merged(below, value)
        both[key] = value
    return both


def yaml_values(text: str) -> Values | None:
    """Return the settings of a YAML file; None where the text is no mapping."""
    try:
        values = next(iter(parse_documents(text, source="")), None)
    except SpecError:
        return None
    return values if isinstance(values, dict) else None


def resolved(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Values:
    """Return settings with their interpolations resolved; what cannot be is left out."""
    return {
        key: value
        for key, value in _resolved_items(values, values, defaults, depth=0)
        if value is not None
    }


def _resolved_items(
    section: Mapping[str, Any], whole: Mapping[str, Any], defaults: Mapping[str, Any], *, depth: int
) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict) and depth < 2 * _DEEPEST:
            yield str(key), dict(_resolved_items(value, whole, defaults, depth=depth + 1))
        elif isinstance(value, str) and "${" in value:
            yield str(key), _interpolated(value, whole, defaults)
        else:
            yield str(key), value


def _interpolated(text: str, whole: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    def value_of(match: re.Match[str]) -> str:
        value = value_at(whole, match[1])
        value = defaults.get(match[1]) if value is None else value
        return str(match[2] or "null") if value is None else str(value)

    for _ in range(_DEEPEST):
        replaced = _PRODUCT.sub(lambda match: str(int(match[1]) * int(match[2])), text)
        replaced = _SELECT.sub(value_of, replaced)
        if replaced == text:
            break
        text = replaced
    return None if "${" in text else scalar(text)


def value_at(values: Mapping[str, Any], name: str) -> Any:
    """Return a setting by its dotted name; None where there is none."""
    current: Any = values
    for key in name.split("."):
        if not isinstance(current, dict) or key not in current:
            return None
        current = current[key]
    return current
