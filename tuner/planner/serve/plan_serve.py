"""From a deployment's spec to its plan: modes answered, compared and certified, ways out solved.

The best mode by the goal's objective is the plan, the others are its alternatives.
"""

from tuner.planner.serve.certificate import certificate_of, space_of
from tuner.planner.serve.front import front_of
from tuner.planner.serve.missing_routers import lacking_routers
from tuner.planner.serve.modes import Answers, answers_of, table_of, unlaunchable_of
from tuner.planner.serve.most_rate import at_rate
from tuner.planner.serve.options import PoolSite
from tuner.planner.serve.prefix_reuse import (
    AGREE_RATIO,
    ROUNDS,
    most_reuse,
    recorded_prompts,
    reuse_of,
    reuse_words,
)
from tuner.planner.serve.refused import refused_cells, refused_handovers, refused_vendors
from tuner.planner.serve.relaxations import closest_of, ways_out, why_nothing
from tuner.planner.serve.solve_mode import Question, Settings, question_of
from tuner.planner.serve.to_plan import (
    alternatives_of,
    binding_constraint,
    cautions_of,
    decision_of,
    notes_of,
    prediction_of,
)
from tuner.serve_plan import PrefixReuse, ServeCertificate, ServePlan, ServeProvenance
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
    question, answers, reuse = _answered(spec, sites, settings)
    spec = question.spec
    solve_s = settings.clock() - started_s
    notes = (*provenance.notes, *notes_of(question))
    if reuse is not None and question.hits is not None:
        notes = (*notes, reuse_words(reuse, planned_ratio=question.hits.ratio))
    provenance = provenance.model_copy(update={"notes": notes})
    if not answers.fitting:
        return _nothing(question, answers, solve_s=solve_s, provenance=provenance)
    best, *others = answers.fitting
    if best.rate_per_s is not None:
        question = at_rate(question, best.rate_per_s)
    provenance = provenance.model_copy(update={"notes": (*notes, *cautions_of(best, question))})
    return ServePlan(
        model=spec.model,
        cluster=spec.cluster,
        goal=question.spec.goal,
        emit=spec.emit,
        decision=decision_of(best, question),
        predicted=prediction_of(best, question),
        certificate=certificate_of(best, question, answers, solve_s=solve_s),
        binding_constraint=binding_constraint(best, question),
        alternatives=tuple(alternatives_of(best, others, question)),
        unlaunchable=(
            *unlaunchable_of(answers, question),
            *refused_handovers(question, best),
            *refused_cells(question, best, answers.of("attention_expert")),
            *lacking_routers(question, best),
            *refused_vendors(question, best),
        ),
        modes=table_of(answers, question),
        prefix_reuse=reuse,
        pareto=front_of(question, answers),
        provenance=provenance,
    )


def _answered(
    spec: ServeSpec, sites: tuple[PoolSite, ...], settings: Settings
) -> tuple[Question, Answers, PrefixReuse | None]:
    """Answer the modes; of a trace that names blocks again until caches and instances agree."""
    question = question_of(spec, sites, settings)
    prompts = recorded_prompts(spec, rate_per_s=question.demand.rate_per_s)
    if prompts is None:
        return question, answers_of(question), None
    hits, reuse = prompts.under(most_reuse(question)), None
    for _ in range(ROUNDS):
        question = question_of(spec, sites, settings, hits=hits, demand=question.demand)
        answers = answers_of(question)
        if not answers.fitting:
            return question, answers, None
        best = answers.fitting[0]
        if best.rate_per_s is not None:
            # The rate was looked for: prompts come at what was found.
            prompts = prompts.at(best.rate_per_s)
        reuse = reuse_of(best, question, prompts)
        if abs(reuse.hit_ratio - hits.ratio) <= AGREE_RATIO:
            break
        hits = prompts.under(reuse)
    return question, answers, reuse


def _nothing(
    question: Question, answers: Answers, *, solve_s: float, provenance: ServeProvenance
) -> ServePlan:
    # Where the rate is the goal there is no traffic to serve less of.
    closest = None if question.spec.goal.objective == "rate" else closest_of(question)
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
            space=space_of(question, answers.found),
            within_band=0,
            solve_s=solve_s,
            method="options",
        ),
        binding_constraint=why_nothing(question, answers, closest),
        relaxations=tuple(ways_out(question, closest)),
        unlaunchable=(*unlaunchable_of(answers, question), *refused_vendors(question, None)),
        modes=table_of(answers, question),
        pareto=front_of(question, answers),
        provenance=provenance,
    )
