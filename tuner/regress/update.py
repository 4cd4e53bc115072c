"""Accepts today's plans: the files and results of `moetune check --update`.

Every file is replaced whole (tuner/output.py), the index of scenarios last. A scenario that passes
keeps its files as they are, so that the diff of an update shows only what changed.
"""

from collections.abc import Sequence
from importlib.metadata import version

from tuner.output import write_files
from tuner.regress.baseline import Baseline, baseline_json, plan_json
from tuner.regress.checks import CheckedScenario
from tuner.regress.measurements import sum_up
from tuner.regress.records import ScenarioResult, ScenarioVerdict
from tuner.regress.scenarios import INDEX_NAME, Checks, Scenario, index_json, measured_profiles


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
    for one in checked:
        if one.plan is None or (
            one.result.verdict is ScenarioVerdict.PASS and _is_complete(one.scenario)
        ):
            results.append(one.result)
            continue
        files = _files(one)
        write_files(one.scenario.accepted, files)
        written += [
            str((one.scenario.accepted / name).relative_to(checks.folder)) for name in files
        ]
        reason = f"accepted, was {one.result.verdict.value}: {one.result.reason}"
        accepted = {"verdict": ScenarioVerdict.PASS, "reason": reason}
        results.append(one.result.model_copy(update=accepted))
    names = index_json(one.name for one in checks.scenarios)
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
