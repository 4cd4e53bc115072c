"""From a deployment's spec to its plan: modes answered, compared and certified, ways out solved.

The best mode by the goal's objective is the plan, the others are its alternatives.
"""

from collections.abc import Sequence

from tuner.planner.serve.answering import Found, Question, Settings, answer, question_of
from tuner.planner.serve.options import PoolSite
from tuner.planner.serve.refused import refused_handovers
from tuner.planner.serve.telling import (
    alternatives_of,
    binding_constraint,
    certificate_of,
    decision_of,
    notes_of,
    prediction_of,
    rank_of,
    refusals_of,
    refused_modes,
    unlaunchable_of,
)
from tuner.planner.serve.ways_out import closest_of, modes_of, ways_out, why_nothing
from tuner.serve_plan import (
    ServeCertificate,
    ServePlan,
    ServeProvenance,
    ServeSpace,
)
from tuner.spec.serving.read import ServeSpec


def make_serve_plan(
    spec: ServeSpec,
    sites: tuple[PoolSite, ...],
    *,
    settings: Settings,
    provenance: ServeProvenance,
) -> ServePlan:
    """Plan a deployment.

    Raises:
        SpecError: the traffic cannot be read.
    """
    started_s = settings.clock()
    question = question_of(spec, sites, settings)
    found = [one for mode in modes_of(question) if (one := answer(question, mode)) is not None]
    refused: dict[str, tuple[str, ...]] = {
        one.solved.program.mode: refusals_of(one, question) for one in found
    }
    fitting = [one for one in found if not one.missed and not refused[one.solved.program.mode]]
    solve_s = settings.clock() - started_s
    notes = (*provenance.notes, *notes_of(question))
    provenance = provenance.model_copy(update={"notes": notes})
    if not fitting:
        return _nothing(question, found, solve_s=solve_s, provenance=provenance)
    order = sorted(fitting, key=lambda one: rank_of(one, spec.goal))
    best = order[0]
    return ServePlan(
        model=spec.model,
        cluster=spec.cluster,
        goal=spec.goal,
        emit=spec.emit,
        decision=decision_of(best, question),
        predicted=prediction_of(best, question),
        certificate=certificate_of(best, question, found, solve_s=solve_s),
        binding_constraint=binding_constraint(best, question),
        alternatives=tuple(alternatives_of(best, order[1:], question)),
        unlaunchable=(
            *unlaunchable_of(question, best),
            *refused_handovers(question, best),
            *refused_modes(best, found, refused),
        ),
        provenance=provenance,
    )


def _nothing(
    question: Question,
    found: Sequence[Found],
    *,
    solve_s: float,
    provenance: ServeProvenance,
) -> ServePlan:
    closest = closest_of(question)
    return ServePlan(
        model=question.spec.model,
        cluster=question.spec.cluster,
        goal=question.spec.goal,
        emit=question.spec.emit,
        decision=None,
        predicted=None,
        certificate=ServeCertificate(
            status="infeasible",
            objective=None,
            bound=None,
            gap_ratio=1.0,
            space=ServeSpace(
                priced=len(question.options.options),
                bounded=0,
                illegal=question.options.illegal,
            ),
            within_band=0,
            solve_s=solve_s,
            method="options",
        ),
        binding_constraint=why_nothing(question, found, closest),
        relaxations=tuple(ways_out(question, closest)),
        provenance=provenance,
    )
