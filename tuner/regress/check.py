"""A whole check as one function, for the command line and for Python callers.

With `--update` today's plans are accepted: every file is replaced whole (tuner/output.py), the
index of scenarios last. A scenario that passes keeps its files as they are, so that the diff of an
update shows only what changed.
"""

import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from tuner.output import write_files
from tuner.paths import AnyPath, to_paths
from tuner.regress.baseline import Baseline, baseline_json, plan_json
from tuner.regress.checks import CheckedScenario, Manner, check_all, missing_scenarios
from tuner.regress.measurements import sum_up
from tuner.regress.profile_check import check_profile
from tuner.regress.records import Check, ScenarioResult, ScenarioVerdict
from tuner.regress.scenarios import (
    INDEX_NAME,
    Checks,
    Scenario,
    index_json,
    measured_profiles,
    read_checks,
)
from tuner.regress.versions import find_other_version


def check(
    folder: AnyPath | None,
    *,
    manner: Manner | None = None,
    against: str = "",
    update: bool = False,
    only: tuple[str, ...] = (),
    profiles: tuple[AnyPath, AnyPath] | None = None,
    on_result: Callable[[ScenarioResult], None] = lambda _: None,
) -> Check:
    """Check the scenarios of a folder, and a profile against an earlier one.

    Args:
        folder: of the scenarios; None where only profiles are compared.
        manner: tolerances, limits, how many at a time; None: the defaults.
        against: another state to compare with, see tuner/regress/versions.py; empty: the accepted
            plans.
        update: accept what is planned today.
        only: names of scenarios; empty: all.
        profiles: a stored profile, and the earlier one to compare it with.
        on_result: called with each result once it is known, from several threads.

    Raises:
        SpecError: the folder, a name or the other state does not exist.
        ProfileUnreadableError: one of the two profiles is missing or damaged.
        EnvironmentMissingError: git, or a system that forks, is not there.
        OutputError: accepted plans cannot be written.
    """
    results: tuple[ScenarioResult, ...] = ()
    if profiles is not None:
        measured, earlier = to_paths(profiles)
        results = check_profile(measured, earlier)
    if folder is None:
        return Check(moetune_version=version("moetune"), scenarios=results)
    folder = Path(folder)
    every = read_checks(folder)
    chosen = every.only(only)
    updated: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        other_version = (
            find_other_version(against, checks=folder, scratch=Path(scratch)) if against else None
        )
        checked = check_all(
            chosen,
            manner=manner or Manner(),
            scratch=Path(scratch),
            other_version=other_version,
            on_result=on_result,
        )
        missing = missing_scenarios(chosen, None if only else other_version)
    planned = tuple(outcome.result for outcome in checked)
    if update:
        planned, updated = accept(every, checked, keeps_index=bool(only))
        missing = tuple(_dropped(result) for result in missing)
    listed = sorted((*planned, *missing), key=lambda result: result.name)
    return Check(
        moetune_version=version("moetune"),
        against="" if other_version is None else other_version.name,
        scenarios=(*results, *listed),
        updated=updated,
    )


def _dropped(result: ScenarioResult) -> ScenarioResult:
    reason = "the scenario is gone, and no longer listed"
    return result.model_copy(update={"verdict": ScenarioVerdict.PASS, "reason": reason})


def accept(
    checks: Checks, checked: Sequence[CheckedScenario], *, keeps_index: bool = False
) -> tuple[tuple[ScenarioResult, ...], tuple[str, ...]]:
    """Store today's plans as accepted; return the results, and the files written.

    Args:
        checks: the scenarios.
        checked: their results.
        keeps_index: some scenarios were not checked, so the index stays.

    Raises:
        OutputError: the folder cannot be written.
        ProfileUnreadableError: a profile is damaged.
    """
    results, written = [], []
    for outcome in checked:
        if outcome.plan is None or (
            outcome.result.verdict is ScenarioVerdict.PASS and _is_complete(outcome.scenario)
        ):
            results.append(outcome.result)
            continue
        files = _files(outcome)
        write_files(outcome.scenario.accepted, files)
        written += [
            str((outcome.scenario.accepted / name).relative_to(checks.folder)) for name in files
        ]
        reason = f"accepted, was {outcome.result.verdict.value}: {outcome.result.reason}"
        accepted = {"verdict": ScenarioVerdict.PASS, "reason": reason}
        results.append(outcome.result.model_copy(update=accepted))
    names = index_json(scenario.name for scenario in checks.scenarios)
    if not (checks.is_single or keeps_index) and _index(checks) != names:
        write_files(checks.folder, {INDEX_NAME: names})
        written.append(INDEX_NAME)
    return tuple(results), tuple(written)


def _index(checks: Checks) -> str:
    file = checks.folder / INDEX_NAME
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _is_complete(scenario: Scenario) -> bool:
    return scenario.plan_file.is_file() and scenario.baseline_file.is_file()


def _files(checked: CheckedScenario) -> dict[str, str]:
    assert checked.plan is not None
    scenario = checked.scenario
    baseline = Baseline(
        moetune_version=version("moetune"),
        profiles={folder.name: sum_up(folder) for folder in measured_profiles(scenario)},
    )
    files = {scenario.baseline_file.name: baseline_json(baseline)}
    if checked.result.verdict is not ScenarioVerdict.PASS or not scenario.plan_file.is_file():
        files[scenario.plan_file.name] = plan_json(checked.plan)
    return files
