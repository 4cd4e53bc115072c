"""Today's price of an accepted training decision, where today's plan has another one.

The spec is planned again with its search limited to the accepted degrees. If the price is the same,
the cost model is unchanged and the search lost the decision; otherwise the model changed. Only done
where a plan became worse, so it costs nothing in the usual case.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tuner.config.knobs import FIELD_OF_DEGREE, KNOBS
from tuner.regress.observed import PlanFacts, plan_facts
from tuner.regress.rules import same_decision
from tuner.regress.workers import PlanningJob, PlanResult
from tuner.spec.files import read_small_text, shown_path
from tuner.spec.yaml_text import parse_yaml

PINNED: Final = (
    *FIELD_OF_DEGREE.values(),
    "zero_stage",
    *(knob.field for knob in KNOBS if knob.is_of_dispatch),
)
"""Choices that a spec's `search` can limit to one value."""


def is_worth_repricing(accepted: PlanFacts, current: PlanFacts) -> bool:
    """Whether today's price of the accepted decision would explain why a plan became worse."""
    return (
        accepted.has_price
        and current.has_price
        and accepted.has_decision
        and current.has_decision
        and not same_decision(accepted.decision, current.decision)
    )


def reprice_decision(
    job: PlanningJob, decision: Mapping[str, Any], *, plan: Callable[[PlanningJob], PlanResult]
) -> float | None:
    """Return today's predicted step time of a decision's degrees; None where it has none.

    Raises:
        SpecError: the spec is no YAML.
    """
    text = read_small_text(job.spec, what="spec")
    raw = parse_yaml(text, source=shown_path(job.spec))
    limits = {name: decision[name] for name in PINNED if decision.get(name) is not None}
    pinned = _with_paths_from(job.spec.absolute().parent, raw)
    pinned["search"] = {**(raw.get("search") or {}), **limits}
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        file = Path(scratch) / "pinned.yaml"
        file.write_text(yaml.safe_dump(pinned, sort_keys=False), encoding="utf-8")
        result = plan(PlanningJob(kind=job.kind, spec=file, profiles=job.profiles))
    if result.plan is None:
        return None
    figures = plan_facts(result.plan).figures
    return figures[0].value if figures else None


def _with_paths_from(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a training spec with its paths made independent of its folder."""
    made = {**raw, "model": str(folder / raw["model"])}
    cluster = raw["cluster"]
    pools = [
        {
            name: str(folder / value) if name in ("profile", "link_matrix") and value else value
            for name, value in pool.items()
        }
        for pool in cluster["pools"]
    ]
    made["cluster"] = {**cluster, "pools": pools}
    routing = raw["goal"].get("routing")
    if routing:
        moved = {**routing, "path": str(folder / routing["path"])}
        made["goal"] = {**raw["goal"], "routing": moved}
    return made
