"""Findings on the measurements that a plan was made from."""

from collections.abc import Iterator
from typing import Final

from tuner.regress.baseline import Baseline
from tuner.regress.measurements import (
    MeasuredBefore,
    families,
    folder_sha256,
    other_hardware,
    other_software,
    sum_up,
)
from tuner.regress.records import AcceptedChange, ScenarioVerdict
from tuner.regress.rules import Finding
from tuner.regress.scenarios import Scenario, measured_profiles

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
