"""The rule by which a release of an engine sizes its KV cache."""

from tuner.engines.registry import serve_traits
from tuner.engines.serve_rules.traits import MemoryRule


def memory_rule(engine: str, release: str = "") -> MemoryRule:
    """Return the rule of a release; of the newest where none or no number is named."""
    rules = serve_traits()[engine].memory
    number = _numbers(release)
    if not number:
        return rules[0]
    return next((rule for rule in rules if rule.since <= number), rules[-1])


def _numbers(release: str) -> tuple[int, ...]:
    """Leading numbers of a release: `0.10.1rc2` is 0, 10, 1."""
    numbers: list[int] = []
    for part in release.strip().lstrip("v").split(".")[:3]:
        digits = part[: next((at for at, sign in enumerate(part) if not sign.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits[:6]))
    return tuple(numbers)
