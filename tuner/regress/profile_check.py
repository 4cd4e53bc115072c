"""`moetune check --profile NEW --baseline OLD`: compares a stored profile with an earlier one.

One result for each kind of operation: regression where cases are significantly slower, missing
where cases are no longer measured. Profiles of other hardware are one incomparable result.
"""

from pathlib import Path

from tuner.regress.measurements import (
    OperationComparison,
    families,
    other_hardware,
    other_software,
    sum_up,
)
from tuner.regress.records import AcceptedChange, ScenarioResult, ScenarioVerdict

KIND = "profile"


def check_profile(new: Path, old: Path) -> tuple[ScenarioResult, ...]:
    """Compare two stored profiles of one kind of machine.

    Raises:
        ProfileUnreadableError: one is missing or damaged.
    """
    before, now = sum_up(old), sum_up(new)
    hardware = other_hardware(before.machine, now.machine)
    if hardware:
        return (
            ScenarioResult(
                name=KIND,
                kind=KIND,
                verdict=ScenarioVerdict.INCOMPARABLE,
                reason=f"profiles of different machines: {hardware}; measure both on one machine",
                file=str(new),
            ),
        )
    results = tuple(_result(family, new) for family in families(before, now))
    if results:
        software = other_software(before.machine, now.machine)
        return tuple(_with_software(one, software) for one in results)
    return (
        ScenarioResult(
            name=KIND,
            kind=KIND,
            verdict=ScenarioVerdict.INCOMPARABLE,
            reason="the baseline holds no measured case of two or more repeats, so nothing can be"
            " compared; measure it with `moetune profile`",
            file=str(new),
        ),
    )


def _result(family: OperationComparison, new: Path) -> ScenarioResult:
    changes: tuple[AcceptedChange, ...] = (
        () if family.verdict is ScenarioVerdict.PASS else (family.change,)
    )
    return ScenarioResult(
        name=f"{KIND} {family.name}",
        kind=KIND,
        verdict=family.verdict,
        reason=family.words,
        changes=changes,
        file=str(new),
    )


def _with_software(result: ScenarioResult, software: tuple[str, ...]) -> ScenarioResult:
    """Add the software changes to the reason of a slower operation."""
    if not software or result.verdict is ScenarioVerdict.PASS:
        return result
    reason = f"{result.reason}; {', '.join(software)}"
    return result.model_copy(update={"reason": reason})
