"""A whole check as one function, for the command line and for Python callers."""

import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from tuner.paths import AnyPath, to_paths
from tuner.regress.checks import Manner, check_all, missing_scenarios
from tuner.regress.profile_check import check_profile
from tuner.regress.records import Check, ScenarioResult, ScenarioVerdict
from tuner.regress.scenarios import read_checks
from tuner.regress.update import accept
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
        other = (
            find_other_version(against, checks=folder, scratch=Path(scratch)) if against else None
        )
        checked = check_all(
            chosen,
            manner=manner or Manner(),
            scratch=Path(scratch),
            other=other,
            on_result=on_result,
        )
        missing = missing_scenarios(chosen, None if only else other)
    planned = tuple(one.result for one in checked)
    if update:
        planned, updated = accept(every, checked, keeps_index=bool(only))
        missing = tuple(_dropped(one) for one in missing)
    listed = sorted((*planned, *missing), key=lambda one: one.name)
    return Check(
        moetune_version=version("moetune"),
        against="" if other is None else other.name,
        scenarios=(*results, *listed),
        updated=updated,
    )


def _dropped(result: ScenarioResult) -> ScenarioResult:
    reason = "the scenario is gone, and no longer listed"
    return result.model_copy(update={"verdict": ScenarioVerdict.PASS, "reason": reason})
