"""Compares a stored profile with an earlier one, or with that of an accepted plan.

The first is `moetune check --profile NEW --baseline OLD`, the second part of checking a scenario.

One result for each kind of operation: regression where cases are significantly slower, missing
where cases are no longer measured. Profiles of other hardware are one incomparable result.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tuner.regress.baseline import Baseline
from tuner.regress.measurements import (
    MeasuredBefore,
    OperationComparison,
    families,
    folder_sha256,
    other_hardware,
    other_software,
    sum_up,
)
from tuner.regress.records import AcceptedChange, ScenarioResult, ScenarioVerdict
from tuner.regress.rules import Finding
from tuner.regress.scenarios import Scenario, measured_profiles

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
        return tuple(_with_software(result, software) for result in results)
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


MOST_NAMED: Final = 2
"""Families of cases, and pieces of software, that a reason names."""


def measurement_findings(scenario: Scenario, baseline: Baseline | None) -> Iterator[Finding]:
    """Compare the profiles with those that the accepted plan was made from."""
    if baseline is None:
        return
    for folder in measured_profiles(scenario):
        before = baseline.profiles.get(folder.name)
        if before is not None and before.sha256 != folder_sha256(folder):
            yield from _profile(folder.name, before, sum_up(folder))


def _profile(name: str, before: MeasuredBefore, now: MeasuredBefore) -> Iterator[Finding]:
    anew = AcceptedChange(what=f"profile {name}", accepted=before.sha256, found=now.sha256)
    hardware = other_hardware(before.machine, now.machine)
    if hardware:
        yield Finding(
            verdict=ScenarioVerdict.INCOMPARABLE,
            words=f"profile {name!r} is of another machine: {hardware}; accept it with --update",
            changes=(anew,),
        )
        return
    software = other_software(before.machine, now.machine)
    software_note = f" ({', '.join(software[:MOST_NAMED])})" if software else ""
    yield Finding(
        verdict=ScenarioVerdict.DRIFT,
        words=f"profile {name!r} was measured anew{software_note}",
        changes=(anew,),
    )
    changed = families(before, now)
    for verdict in (ScenarioVerdict.REGRESSION, ScenarioVerdict.MISSING, ScenarioVerdict.BETTER):
        some = [family for family in changed if family.verdict is verdict]
        if some:
            more = f" and {len(some) - MOST_NAMED} more" if len(some) > MOST_NAMED else ""
            words = "; ".join(family.words for family in some[:MOST_NAMED])
            yield Finding(
                verdict=verdict if verdict is ScenarioVerdict.REGRESSION else ScenarioVerdict.DRIFT,
                words=f"profile {name!r}{software_note}: {words}{more}",
                changes=tuple(family.change for family in some),
            )
