"""Fields of plans, certificates and provenance that all goals share."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from profilers.records import Record, Seconds


class GoalCertificate(Record):
    """Solver status, objective and bound of the choice, under the model."""

    status: Literal["optimal", "feasible", "infeasible", "unknown"]
    objective: float | None
    """Predicted objective of the best decision found; absent without one."""
    bound: float | None
    """Lower bound of the objective of every legal candidate, or an upper one where more is
    better."""
    gap_ratio: Annotated[float, Field(ge=0.0, le=1.0)]
    """Distance from the objective to the bound, as a share of the objective."""
    solve_s: Seconds
    """Wall time of planning: from reading the spec to the finished plan, all searches included."""
    method: str


class GoalProvenance(Record):
    """The inputs of the plan."""

    moetune_version: str
    spec_sha256: str
    notes: tuple[str, ...] = ()
    """Assumptions, e.g. that routing was assumed balanced."""


class GoalPlan(Record):
    """`plan.json`: a decision with its prediction and certificate, or none of the three solved."""

    schema_version: Literal[1] = 1
    # 1: first release.
    emit: tuple[str, ...]
    decision: Record | None
    predicted: Record | None
    certificate: GoalCertificate
    binding_constraint: str
    """Limit on the plan's speed, or what makes it infeasible."""
    files: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_decided_if_solved(self) -> Self:
        is_solved = self.certificate.status in ("optimal", "feasible")
        if any(is_solved != (part is not None) for part in (self.decision, self.predicted)):
            raise ValueError(f"status {self.certificate.status} disagrees with the decision")
        return self
