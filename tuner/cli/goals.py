"""What a command asks and prints for each goal: the modules train, serve and place beside this."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

if TYPE_CHECKING:
    from tuner.draft.draft import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `moetune plan`."""

    out: Path
    profiles: tuple[Path, ...]
    top: int
    time_limit_s: float
    method: str
    calibrated: bool
    verbose: bool
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """Options of `moetune estimate`."""

    launch: str
    format_name: str | None
    profiles: tuple[Path, ...]
    calibrated: bool
    pool: str | None
    instances: int | None
    role: str | None
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Options of `moetune verify`."""

    trials: int
    steps: int
    budget: str
    max_devices: int | None
    launcher: str
    slurm: tuple[str, ...]
    slurm_wait: str
    requeue: bool
    parallel: int
    command: str
    network: Literal["own", "host"]
    metrics: str
    benchmark: str
    url: str
    health: tuple[str, ...]
    runs: int
    start_limit: str
    repeats: int
    resume: bool
    storage: str
    as_json: bool


class GoalCommands(Protocol):
    """What the commands do for one goal: a module of it beside this file."""

    VERIFY_OPTIONS: tuple[str, ...]
    """Options of `moetune verify` that plans of other goals do not have..."""
    PURPOSE: str
    """...and what they are for, in a refusal."""

    OTHER_LAUNCHER: str
    """Why trials are started here only, in a refusal; empty: by any launcher."""
    plan: Callable[[Path, PlanOptions], Any]
    """Plan a spec, write, print and return the plan."""
    estimate: Callable[[Path, EstimateOptions], None]
    """Price a launch and print it. Exits with 1 where it cannot run."""
    explanation: Callable[..., str]
    """Text of an explained plan: folder, verbose."""
    verify: Callable[[Path, VerifyOptions], None]
    """Launch the candidates of a plan's folder and print the conclusion."""


def commands_of(kind: str | None) -> GoalCommands:
    """Return the module of a goal; what is of no goal is refused where training is read."""
    from tuner.goals.registry import kind_or_first

    return cast(GoalCommands, import_module(f"tuner.cli.{kind_or_first(kind)}"))


def draft_of(kind: str | None) -> "Draft":
    """Return the simple spec of a goal.

    Raises:
        SpecError: there is no such goal.
    """
    draft: Draft = import_module(f"tuner.draft.{checked_goal(kind)}").DRAFT
    return draft


def checked_goal(text: str | None) -> str:
    """Read the kind of a goal; the first there is where none is named.

    Raises:
        SpecError: none of them.
    """
    from tuner.errors import SpecError
    from tuner.goals.registry import GOALS, kind_or_first
    from tuner.spec.files import shown_value

    if text and text not in GOALS:
        raise SpecError(f"--goal: {shown_value(text)} is not one of {', '.join(GOALS)}")
    return kind_or_first(text)
