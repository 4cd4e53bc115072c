"""A server's options file, as flags.

Keys of nested mappings are joined by dots: `kv_cache_config: {dtype: fp8}` becomes
`kv-cache-config.dtype`. The file overrides the command, as in `trtllm-serve`, or the command the
file, as in vLLM and SGLang. A path is looked up by its file name, because its folder is known only
to the script or pod.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, Final

from tuner.engines.reading.arguments import Flags
from tuner.engines.reading.variables import defaults_note, with_defaults
from tuner.errors import SpecError
from tuner.spec.files import shown_value
from tuner.spec.yaml_text import parse_documents

Beside = Callable[[str], str | None]
"""Returns the text of a file that a command names; None where there is none."""
_DEEPEST: Final = 8
_MOST: Final = 10_000
"""Options of one file."""
_TOP: Final = re.compile(r"^([A-Za-z_-]+):", re.MULTILINE)
_FEWEST: Final = 2
"""Least number of known options for a file to count as a server's."""


def with_options(
    flags: Flags,
    names: tuple[str, ...],
    beside: Beside,
    *,
    file_counts: bool = True,
    canonical: Callable[[str], str] = str,
) -> Flags:
    """Return flags with the options of the file that one of them names, written by the text or not.

    Args:
        flags: of the command.
        names: flags that name a file.
        beside: gives files that the text names.
        file_counts: the file overrides the command, else the command the file.
        canonical: gives the name of an option as the file spells it.

    Raises:
        SpecError: the file is not there, or holds no options.
    """
    # Where a command would print the folder, the last word has the file name.
    named = next((flags.values[name][-1] for name in names if flags.values.get(name)), None)
    if named is None:
        return flags
    text = flags.files.get(last_part(named), beside(named))
    if text is None:
        raise SpecError(
            f"{flags.source}: the options file {shown_value(last_part(named))} is not beside it;"
            " estimate the script where it was written, or name the file itself"
        )
    mapping = _mapping(text)
    if mapping is None:
        raise SpecError(
            f"{flags.source}: the options file {shown_value(last_part(named))} holds no options"
        )
    defaults: dict[str, str] = {}
    stated = {canonical(name): value for name, value in _flat(mapping, defaults)}
    notes = [*flags.notes, *defaults_note(defaults)]
    if not file_counts:
        return replace(flags, values={**stated, **flags.values}, notes=tuple(notes))
    notes += [
        f"{flags.said(name)} is overridden by {last_part(named)[:80]}"
        for name, value in stated.items()
        if flags.values.get(name, value) != value
    ]
    return replace(flags, values={**flags.values, **stated}, notes=tuple(notes))


def with_further(
    flags: Flags, names: tuple[str, ...], beside: Beside, *, known: frozenset[str]
) -> Flags:
    """Return flags with the known options of further files that options name."""
    values = dict(flags.values)
    defaults: dict[str, str] = {}
    for name in names:
        text = beside(flags.values[name][0]) if flags.values.get(name) else None
        mapping = None if text is None else _mapping(text)
        if mapping is not None:
            flat = dict(_flat(mapping, defaults, before=f"{name}."))
            values |= {key: value for key, value in flat.items() if key in known}
    return replace(flags, values=values, notes=(*flags.notes, *defaults_note(defaults)))


def options_file_flags(
    text: str, *, source: str, known: frozenset[str], canonical: Callable[[str], str] = str
) -> Flags | None:
    """Return the options of a pure options file; None for any other text."""
    named = {canonical(name.replace("_", "-")) for name in _TOP.findall(text)}
    mapping = _mapping(text) if len(known & named) >= _FEWEST else None
    defaults: dict[str, str] = {}
    values = {canonical(name): value for name, value in _flat(mapping or {}, defaults)}
    if len(known & set(values)) < _FEWEST:
        return None
    return Flags(source=source, values=values, notes=defaults_note(defaults))


def last_part(word: str) -> str:
    """Return the name of a file without its folder."""
    return PurePosixPath(word).name


def _mapping(text: str) -> Mapping[str, Any] | None:
    try:
        mapping = next(iter(parse_documents(text, source="")), None)
    except SpecError:
        return None
    return mapping if isinstance(mapping, dict) else None


def _flat(
    options: Mapping[Any, Any], defaults: dict[str, str], *, before: str = ""
) -> Iterator[tuple[str, tuple[str, ...]]]:
    # YAML aliases can expand a short text without bound.
    return islice(_all_flat(options, defaults, before=before), _MOST)


def _all_flat(
    options: Mapping[Any, Any], defaults: dict[str, str], *, before: str, depth: int = 0
) -> Iterator[tuple[str, tuple[str, ...]]]:
    for key, value in options.items():
        spelled = key if isinstance(key, str) else shown_value(key)
        name = f"{before}{spelled}".replace("_", "-")
        if isinstance(value, dict) and value and depth < _DEEPEST:
            yield from _all_flat(value, defaults, before=f"{name}.", depth=depth + 1)
        else:
            yield name, (_word(value, defaults),)


def _word(value: Any, defaults: dict[str, str]) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | dict):
        return f"{len(value)} values"
    if isinstance(value, int):
        return shown_value(value)
    return with_defaults(str(value)[:200], defaults)
