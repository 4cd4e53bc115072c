"""All mistakes of a launch in one line, instead of the first of them.

A reader refuses the first setting that it cannot use. It is asked again without the settings that
the refusal names, until it refuses nothing more. A refusal that names a setting left out before is
a consequence and not said; so is one that names a degree of parallelism where such a degree was
left out, because degrees depend on each other. A flag that a launch must have is 1 instead.
"""

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import Any, Final, TypeVar

from tuner.engines.reading.arguments import Flags
from tuner.engines.reading.sections import Sections
from tuner.errors import SpecError

MOST_SAID: Final = 5
_MOST_TRIES: Final = 20
_FLAG: Final = re.compile(r"--([A-Za-z][\w.-]*\w)")
_KEY: Final = re.compile(r"\w+(?:\.\w+)+|\w+_\w+")
_DEGREE: Final = re.compile(r"parallel|tensor|pipeline|(^|[-_.])(tp|dp|ep|pp|cp)([-_.]|$)")

T = TypeVar("T")


def check_all(source: str, *checks: Callable[[], object]) -> None:
    """Run checks that do not depend on each other.

    Raises:
        SpecError: one line with all that they refuse.
    """
    said = []
    for check in checks:
        try:
            check()
        except SpecError as error:
            said.append(str(error))
    if said:
        raise SpecError(joined(said, source=source))


def joined(refusals: Sequence[str], *, source: str) -> str:
    """Return one line that says every refusal once."""
    said = list(dict.fromkeys(refusal.removeprefix(f"{source}: ") for refusal in refusals))
    if len(said) == 1:
        return refusals[0]
    numbered = [f"({number}) {refusal}" for number, refusal in enumerate(said[:MOST_SAID], start=1)]
    more = f"; and {len(said) - MOST_SAID} more" if len(said) > MOST_SAID else ""
    return f"{source}: {len(said)} mistakes: {'; '.join(numbered)}{more}"


def read_flags(flags: Flags, read: Callable[[Flags], T]) -> T:
    """Read flags, or refuse all that cannot be used.

    Raises:
        SpecError: one line.
    """

    def named(text: str) -> set[str]:
        return {name.replace("_", "-") for name in _FLAG.findall(text)}

    def read_without(left_out: Collection[str], needed: Collection[str]) -> T:
        values = {name: words for name, words in flags.values.items() if name not in left_out}
        return read(replace(flags, values=values | dict.fromkeys(needed, ("1",))))

    return _read(read_without, named, frozenset(flags.values), source=flags.source)


def read_sections(
    values: Mapping[str, Any],
    read: Callable[[Sections], T],
    *,
    source: str,
    defaults: Mapping[str, Any] | None = None,
) -> T:
    """Read nested settings, or refuse all that cannot be used.

    Raises:
        SpecError: one line.
    """

    def read_without(left_out: Collection[str], _: Collection[str]) -> T:
        kept = copy.deepcopy(dict(values))
        for name in left_out:
            *sections, key = name.split(".")
            reduce(getitem, sections, kept).pop(key)
        return read(Sections(kept, source=source, defaults=defaults))

    names = frozenset(_names(values))
    return _read(read_without, lambda text: set(_KEY.findall(text)), names, source=source)


def _names(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if "." in key:
            continue
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _read(
    read_without: Callable[[Collection[str], Collection[str]], T],
    named: Callable[[str], set[str]],
    present: Collection[str],
    *,
    source: str,
) -> T:
    said: list[str] = []
    left_out: set[str] = set()
    needed: set[str] = set()
    for _ in range(_MOST_TRIES):
        try:
            result = read_without(left_out, needed)
        except SpecError as error:
            names = named(str(error))
            if not said or not _follows(names, left_out):
                said.append(str(error))
            new, missing = (names & set(present)) - left_out, (names & left_out) - needed
            if not new and not missing:
                break
            left_out |= new
            needed |= set() if new else missing
        else:
            if not said:
                return result
            break
    raise SpecError(joined(said, source=source))


def _follows(names: Collection[str], left_out: Collection[str]) -> bool:
    """Say whether a refusal may come from what was left out."""
    is_degree = [any(map(_DEGREE.search, group)) for group in (names, left_out)]
    return not set(names).isdisjoint(left_out) or all(is_degree) or not names
