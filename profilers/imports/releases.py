"""The order of releases by their written versions."""

import re
from typing import Final

_BEFORE_RELEASE: Final = ("a", "alpha", "b", "beta", "rc", "dev")


def release_order(version: str) -> tuple[tuple[int, int], ...]:
    """Sort 1.3.0rc10 before 1.3.0rc20 before 1.3.0 before 1.3.0.post1."""
    key = []
    for word in re.findall(r"\d+|[a-z]+", version.lower()):
        if word.isdigit():
            key.append((2, int(word)))
        else:
            key.append((0, _BEFORE_RELEASE.index(word)) if word in _BEFORE_RELEASE else (3, 0))
    return (*key, (1, 0))
