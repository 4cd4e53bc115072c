"""The layout of a folder of checks, and its scenarios.

    CHECKS/scenarios.json       names that must be there, written by --update; optional
    CHECKS/NAME/spec.yaml       the spec; paths relative to it
    CHECKS/NAME/profile/        a stored profile; several in profiles/<any name>/; both optional,
                                as the spec may name its own or plan from datasheets
    CHECKS/NAME/plan.json       the accepted plan, as `moetune plan` or --update wrote it; may also
                                lie in NAME/plan/, so that a plan's whole folder can be kept
    CHECKS/NAME/baseline.json   beside plan.json: the profile at acceptance, by --update

So `moetune plan NAME/spec.yaml -o NAME/plan` makes a scenario of a spec. A folder that has a spec
itself is a single scenario. Names that begin with a dot are skipped, and names with line ends or
control characters are refused.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError

from profilers.errors import first_problem
from profilers.records import Record
from profilers.store import holds_profile
from tuner.errors import SpecError, TunerError
from tuner.plans.folder import PLAN_NAME
from tuner.spec.files import read_json_object, read_small_text, shown_path
from tuner.spec.yaml_text import parse_yaml

SPEC_NAME: Final = "spec.yaml"
BASELINE_NAME: Final = "baseline.json"
INDEX_NAME: Final = "scenarios.json"
LARGEST_INDEX_BYTES: Final = 2**20
MOST_SCENARIOS: Final = 10_000


class Index(Record):
    """`scenarios.json`: what must be there, so that a removed scenario is noticed."""

    schema_version: Literal[1] = 1
    names: tuple[str, ...] = Field(max_length=MOST_SCENARIOS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A spec with what it is planned on and the folder of its accepted plan."""

    name: str
    spec: Path
    profiles: tuple[Path, ...]
    """Given to the planner in place of those that the spec names."""
    accepted: Path
    """Folder of `plan.json` and `baseline.json`, which need not exist."""

    @property
    def plan_file(self) -> Path:
        """The accepted plan."""
        return self.accepted / PLAN_NAME

    @property
    def baseline_file(self) -> Path:
        """The profile at acceptance."""
        return self.accepted / BASELINE_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """All scenarios of a folder, and the names that are listed and missing."""

    folder: Path
    scenarios: tuple[Scenario, ...]
    gone: tuple[str, ...]
    is_single: bool
    """The folder is one scenario itself, so there is no index."""

    def only(self, names: Iterable[str]) -> "Checks":
        """Keep the named scenarios; all where none is named.

        Raises:
            TunerError: there is no such scenario.
        """
        wanted = frozenset(names)
        if not wanted:
            return self
        there = {scenario.name for scenario in self.scenarios} | set(self.gone)
        if unknown := sorted(wanted - there):
            raise TunerError(
                f"--only {unknown[0]!r} is no scenario of {shown_path(self.folder)}; there are "
                + ", ".join(sorted(there))
            )
        return Checks(
            folder=self.folder,
            scenarios=tuple(scenario for scenario in self.scenarios if scenario.name in wanted),
            gone=tuple(name for name in self.gone if name in wanted),
            is_single=self.is_single,
        )


def read_checks(folder: Path) -> Checks:
    """List the scenarios of a folder by name.

    Raises:
        SpecError: it does not exist, has no scenario or one with a name that cannot be printed, or
            its index is damaged.
    """
    if not folder.is_dir():
        raise SpecError(
            f"{shown_path(folder)}: no such folder; give one with a folder for each scenario"
        )
    if (folder / SPEC_NAME).is_file():
        single = _scenario(folder, name=folder.resolve().name)
        return Checks(folder=folder, scenarios=(single,), gone=(), is_single=True)
    below = sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    scenarios = tuple(
        _scenario(path, name=path.name) for path in below if (path / SPEC_NAME).is_file()
    )
    _refuse_unprintable(folder, (scenario.name for scenario in scenarios))
    gone = tuple(sorted(set(_indexed(folder)) - {scenario.name for scenario in scenarios}))
    if not scenarios and not gone:
        raise SpecError(
            f"{shown_path(folder)}: no scenario in it; make one with"
            f" `moetune plan SPEC.yaml -o {shown_path(folder)}/NAME/plan`"
            f" and copy the spec to {shown_path(folder)}/NAME/{SPEC_NAME}"
        )
    return Checks(folder=folder, scenarios=scenarios, gone=gone, is_single=False)


def index_json(names: Iterable[str]) -> str:
    """Return `scenarios.json` for these names."""
    return Index(names=tuple(sorted(names))).model_dump_json(indent=2) + "\n"


def measured_profiles(scenario: Scenario) -> tuple[Path, ...]:
    """Return the folders of stored profiles that a scenario is planned on.

    Raises:
        SpecError: the spec is no YAML.
    """
    if scenario.profiles:
        return scenario.profiles
    text = read_small_text(scenario.spec, what="spec")
    raw = parse_yaml(text, source=shown_path(scenario.spec))
    cluster = raw.get("cluster") if isinstance(raw, dict) else None
    pools = cluster.get("pools") if isinstance(cluster, dict) else None
    named = [
        pool.get("profile")
        for pool in (pools if isinstance(pools, list) else [])
        if isinstance(pool, dict)
    ]
    folders = (scenario.spec.parent / name for name in named if isinstance(name, str))
    return tuple(folder for folder in folders if holds_profile(folder))


def _indexed(folder: Path) -> tuple[str, ...]:
    file = folder / INDEX_NAME
    if not file.is_file():
        return ()
    raw = read_json_object(file, what="index of scenarios", most_bytes=LARGEST_INDEX_BYTES)
    try:
        return Index.model_validate_json(json.dumps(raw)).names
    except ValidationError as error:
        raise SpecError(
            f"{shown_path(file)}: {first_problem(error)}; write it anew with --update"
        ) from error


def _refuse_unprintable(folder: Path, names: Iterable[str]) -> None:
    """Names go into tables, logs, XML and commands of CI systems, one to a line."""
    for name in names:
        if not name.isprintable():
            raise SpecError(
                f"{shown_path(folder)}: the folder {name!a} has characters in its name that"
                " cannot be printed; rename it"
            )


def _scenario(folder: Path, *, name: str) -> Scenario:
    nested = folder / "plan"
    return Scenario(
        name=name,
        spec=folder / SPEC_NAME,
        profiles=_profiles(folder),
        accepted=nested if not (folder / PLAN_NAME).exists() and nested.is_dir() else folder,
    )


def _profiles(folder: Path) -> tuple[Path, ...]:
    if (folder / "profile").is_dir():
        return (folder / "profile",)
    several = folder / "profiles"
    if not several.is_dir():
        return ()
    return tuple(sorted(path for path in several.iterdir() if path.is_dir()))
