"""The files that are stored when a scenario's plan is accepted.

    plan.json       the accepted plan: whole as `moetune plan` wrote it, or pruned by --update to
                    what is compared, so that a repository of scenarios stays small
    baseline.json   a summary of what was measured

A plan of this schema is read by its type, so a field that was dropped without a new version of the
schema is noticed; one of a newer schema is refused with the version that is needed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from profilers.errors import first_problem
from profilers.records import Record
from profilers.schema_version import refusal_of
from tuner.errors import PlanUnreadableError
from tuner.goals.registry import GOALS, load_goal
from tuner.plans.folder import MAX_PLAN_BYTES
from tuner.regress.measurements import MeasuredBefore
from tuner.spec.files import read_json_object, shown_path

MOST_TIES: Final = 4
"""Runners-up that an accepted plan keeps, and variants of layouts."""
PRUNED: Final = ("pareto", "relaxations", "unlaunchable", "files")
"""Lists of a plan that are not compared."""


class Baseline(Record):
    """`baseline.json`."""

    schema_version: Literal[1] = 1
    moetune_version: str
    effort: Any = Field(default=None, exclude=True)
    """Planning effort stored by older releases, which timed planning; read by nothing."""
    profiles: dict[str, MeasuredBefore] = Field(default_factory=dict)
    """Stored profiles by name of the folder."""


def read_accepted(file: Path) -> Mapping[str, Any] | None:
    """Read an accepted plan; None where there is none.

    Raises:
        PlanUnreadableError: it is damaged, or of a schema that this version does not read.
    """
    if not file.exists():
        return None
    values = read_json_object(file, what="plan", most_bytes=MAX_PLAN_BYTES)
    goal = values.get("goal")
    kind = goal.get("kind") if isinstance(goal, dict) else None
    if not isinstance(kind, str) or kind not in GOALS:
        raise PlanUnreadableError(
            f"{shown_path(file)}: goal.kind {kind!r} is not one of {', '.join(GOALS)}"
        )
    stored_type = load_goal(kind).plan_type
    known = stored_type.model_fields["schema_version"].default
    refuse_newer(values, known=known, file=file)
    try:
        text = json.dumps(values, allow_nan=False)
    except ValueError as error:
        raise PlanUnreadableError(
            f"{shown_path(file)}: holds NaN or Infinity, which nothing can be compared with; accept"
            " a new one with --update"
        ) from error
    try:
        stored_type.model_validate_json(text)
    except ValidationError as error:
        raise PlanUnreadableError(
            f"{shown_path(file)}: {first_problem(error)}: the schema of plans changed, or the file"
            " was edited; plans of schema version"
            f" {known} must stay readable, or accept a new one with --update"
        ) from error
    return values


def read_baseline(file: Path) -> Baseline | None:
    """Read the baseline file beside an accepted plan; None where there is none.

    Raises:
        PlanUnreadableError: it is damaged, or of a schema that this version does not read.
    """
    if not file.exists():
        return None
    values = read_json_object(file, what="baseline", most_bytes=MAX_PLAN_BYTES)
    refuse_newer(values, known=1, file=file)
    try:
        return Baseline.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise PlanUnreadableError(
            f"{shown_path(file)}: {first_problem(error)}; write it anew with --update"
        ) from error


def refuse_newer(values: Mapping[str, Any], *, known: int, file: Path) -> None:
    """Refuse a file of a later schema than this version reads.

    Raises:
        PlanUnreadableError: with the version of moetune that is needed.
    """
    if refusal := refusal_of(dict(values), known=known):
        raise PlanUnreadableError(f"{shown_path(file)}: {refusal}")


def pruned(values: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce a plan to what is compared and a few ties; the result is a valid plan."""
    kept = {name: value for name, value in values.items() if name not in PRUNED}
    for name in ("alternatives", "variants"):
        ties = [
            alternative for alternative in values.get(name, ()) if alternative.get("within_band")
        ]
        if name in values:
            kept[name] = [_without_stages(tie) for tie in ties[:MOST_TIES]]
    return kept


def _without_stages(tie: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the per-stage part of a training prediction; its sums stay."""
    predicted = tie.get("predicted")
    if not predicted or "stages" not in predicted:
        return dict(tie)
    return {**tie, "predicted": {**predicted, "stages": []}}


def plan_json(values: Mapping[str, Any]) -> str:
    """Return an accepted plan as a file that diffs well."""
    return _laid_out(pruned(values), depth=2) + "\n"


def baseline_json(baseline: Baseline) -> str:
    """Return a baseline as a file with one line a kind of operation."""
    return _laid_out(baseline.model_dump(mode="json"), depth=4) + "\n"


def _laid_out(values: Any, *, depth: int) -> str:
    """Return JSON with a line for every entry down to a depth, and one line for all below."""
    if depth == 0 or not values or not isinstance(values, dict | list):
        return json.dumps(values, separators=(",", ":"))
    if isinstance(values, list):
        return "[\n" + ",\n".join(_laid_out(value, depth=depth - 1) for value in values) + "\n]"
    lines = (
        f"{json.dumps(name)}: {_laid_out(value, depth=depth - 1)}" for name, value in values.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}"
