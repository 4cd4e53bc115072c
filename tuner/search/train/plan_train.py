"""Plan of a spec on described devices: build the problem, search, refine, certify.

The search ranks rows by the closed form of a step. The best of them are simulated pass by pass, and
the objective is the longer of the two (finalists.py). The solver of layouts may move layers and
recomputation of the very best; its solution is priced and simulated like the others. Of the
decisions that the model cannot tell from the fastest, another one may be preferred (preference.py).

After that follow-up searches look for what would help: nodes, memory, features that the targets
lack. They share one more time limit; relaxations of memory get the first half of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from tuner.config.knobs import overlaps_contend
from tuner.config.shapes import number
from tuner.config.train import TrainDecision
from tuner.devices.datasheet import Generation
from tuner.plans.train import Band, Plan, Provenance, Relaxation
from tuner.search.forked import numbers
from tuner.search.layout_groups import by_layout
from tuner.search.progress import PlanningEvent, ignore_progress
from tuner.search.reasons import (
    MEMORY_LIMIT,
    UNLIMITED_BYTES,
    binding_constraint,
    what_is_not_known,
)
from tuner.search.settings import SearchSettings
from tuner.search.to_plan import to_plan, with_notes, without_decision
from tuner.search.train.build_problem import PricedPool, build_problem
from tuner.search.train.extrapolation import weigh_extrapolation, with_extrapolation_notes
from tuner.search.train.finalists import (
    rank_by_simulation,
    refine_finalist,
    simulated_s,
    unsettled_notes,
)
from tuner.search.train.gradient_buckets import bucket_note, saved_s, with_best_bucket
from tuner.search.train.headroom_search import (
    NO_HEADROOM,
    Headroom,
    has_enough_headroom,
    search_headroom,
)
from tuner.search.train.larger_pool import (
    headroom_relaxations,
    more_host_memory,
    more_memory,
    more_nodes,
)
from tuner.search.train.memory_risk import LIKELY, SMALL, loss_prices
from tuner.search.train.plan_fields import (
    ChosenDecision,
    PlanFormatter,
    PricedDecision,
    effective_step_s,
    refuse_impossible_checkpoints,
)
from tuner.search.train.preference import TOLERANCE_RATIO, Preferred, choose_preferred
from tuner.search.train.problem import TrainProblem
from tuner.search.train.regimes import priced_release
from tuner.search.train.relaxations import (
    NOT_SEARCHED,
    blocking_rules,
    feature_tasks,
    least_sufficient_memory,
    unlaunchable,
)
from tuner.search.train.search import search
from tuner.search.train.search_result import (
    Detail,
    SearchOutcome,
    SimulatedRow,
    price_solution,
    solution_fields,
    to_certificate,
)
from tuner.search.train.space_size import has_legal
from tuner.search.train.ties import count_ties, pool_band, pool_ratios
from tuner.spec.spec import Spec

NUM_FINALISTS = 3
"""Rows whose layout the solver of layouts refines."""


def make_analytic_plan(
    spec: Spec,
    priced_pool: PricedPool,
    *,
    settings: SearchSettings,
    provenance: Provenance,
    with_unlaunchable: bool = True,
) -> Plan:
    """Plan a training run from device descriptions.

    Features that the targets lack are searched one by one, unless `with_unlaunchable` is False.

    Raises:
        SpecError: the spec asks for what no device or target can do.
    """
    problem = build_problem(spec, priced_pool)
    priced = priced_release(spec.programs, spec.goal.engine, priced_pool.residuals)
    band, widening = pool_band(spec, priced_pool)
    settings = replace(settings, band_ratio=max(settings.band_ratio, TOLERANCE_RATIO))
    watch, settings = settings.watch, replace(settings, watch=ignore_progress)
    outcome = search(problem, replace(settings, watch=watch))
    notes: tuple[str, ...] = tuple(filter(None, (priced.note, widening)))
    if outcome.solutions is None and spec.search != problem.limits:
        watch(PlanningEvent(stage="search", text="nothing fits; retrying with offloading"))
        outcome = search(replace(problem, limits=spec.search), settings)
        if outcome.solutions is not None:
            notes += ("fits only with offloading or dropped tokens, which no published run prices",)
    if outcome.solutions is None:
        watch(PlanningEvent(stage="relaxations", text="nothing fits; searching for what would"))
        provenance = with_extrapolation_notes(with_notes(provenance, notes), problem, None)
        return _plan_nothing(
            spec, priced_pool, outcome, settings, problem=problem, band=band, provenance=provenance
        )
    watch(PlanningEvent(stage="choice", text="simulating the best pass by pass to rank them"))
    choice = _choose(outcome, settings, spec=spec, priced_pool=priced_pool)
    best = choice.chosen
    notes += (
        *_connection_notes(best.decision, priced_pool),
        *filter(None, (best.note,)),
        *unsettled_notes(best.detail),
    )
    rests_on = weigh_extrapolation(outcome, best.candidate, best.detail.stages)
    ratios = pool_ratios(spec, priced_pool, band=band)
    if rests_on is not None:
        band, ratios = rests_on.widened(band), ratios.widened(rests_on.stretch)
    formatter = PlanFormatter(
        spec=spec, priced_pool=priced_pool, search=outcome, band=band, ratios=ratios
    )
    # Before other searches, whose extrapolations are not the plan's.
    provenance = with_extrapolation_notes(with_notes(provenance, notes), problem, rests_on)
    deadline = settings.begin()
    predicted = formatter.with_wider_rows(formatter.simulated_prediction(best), best)
    refuse_impossible_checkpoints(spec.goal, predicted)
    room = formatter.roomier(choice)
    chance = predicted.out_of_memory_probability or 0.0
    room_out: tuple[Relaxation, ...] = ()
    if chance > LIKELY and choice.headroom.safe_peak_ratio:
        watch(PlanningEvent(stage="relaxations", text="searching for headroom"))
        ratio = choice.headroom.safe_peak_ratio
        half = replace(settings, time_limit_s=settings.time_limit_s / 2.0)
        room_out = headroom_relaxations(
            spec, priced_pool, safe_peak_ratio=ratio, settings=half, band=band
        )
    left = settings.until(deadline)
    features = feature_tasks(outcome, left) if with_unlaunchable else {}
    events = (
        PlanningEvent(stage="memory", text="searching again without its limit"),
        *(
            PlanningEvent(
                stage="targets", text=f"{index} of {len(features)} missing features: {feature}"
            )
            for index, feature in enumerate(features)
        ),
    )
    unlimited_s, *step_s = numbers(
        (partial(_unlimited_s, outcome, left, choice.fastest.objective_s), *features.values()),
        processes=settings.processes,
        patience_s=left.time_limit_s,
        starting=lambda index: watch(events[index]),
    )
    step_s_of = dict(zip(features, step_s, strict=True))
    return to_plan(
        spec,
        certificate=to_certificate(
            outcome,
            ties=count_ties(outcome, ratios, chosen=best.decision, step_s=best.objective_s),
            objective_s=choice.fastest.objective_s,
            decision_s=None if choice.is_fastest else best.objective_s,
        ),
        provenance=with_notes(provenance, _time_notes(step_s_of)),
        decision=best.decision,
        predicted=predicted,
        relaxations=room_out,
        preferred=formatter.preference(choice, room),
        roomier=room,
        roomier_within_ratio=choice.searched_ratio,
        no_roomier=chance > SMALL and room is None and choice.has_searched_all,
        binding_constraint=binding_constraint(
            predicted,
            fastest_s=formatter.simulated_prediction(choice.fastest).step_time_s,
            unlimited_s=unlimited_s,
            memory_limit_bytes=int(problem.memory_limit_bytes),
        ),
        **by_layout(best.decision, formatter.alternatives(choice, top=settings.top)),
        pareto=formatter.pareto(),
        unlaunchable=unlaunchable(
            problem.capabilities, float(outcome.solutions.step_s[0]), step_s_of
        ),
    )


def _plan_nothing(
    spec: Spec,
    priced_pool: PricedPool,
    outcome: SearchOutcome,
    settings: SearchSettings,
    *,
    problem: TrainProblem,
    band: Band,
    provenance: Provenance,
) -> Plan:
    """Search for what would make something fit, nodes first where memory is all that is short."""
    deadline = settings.begin()
    half = replace(settings, time_limit_s=settings.time_limit_s / 2.0)
    limits = more_host_memory(
        spec, priced_pool, replace(problem, limits=spec.search), settings=half, band=band
    )
    if not has_legal(problem):
        limits += blocking_rules(problem)
    elif not limits or least_sufficient_memory(problem) > problem.memory_limit_bytes:
        limits += (more_memory(spec, priced_pool, problem, settings=half, band=band),)
    binding = ", ".join(relaxation.limit for relaxation in limits)
    if any(relaxation.limit == MEMORY_LIMIT for relaxation in limits):
        left = settings.until(deadline)
        limits = (*more_nodes(spec, priced_pool, settings=left, band=band), *limits)
    certificate = to_certificate(outcome)
    not_known = what_is_not_known(certificate, time_limit_s=settings.time_limit_s)
    return without_decision(
        spec,
        certificate=certificate,
        provenance=provenance,
        reason=not_known or binding,
        relaxations=limits,
    )


def _unlimited_s(outcome: SearchOutcome, settings: SearchSettings, below_s: float) -> float | None:
    """Seconds of the fastest step in any memory, with its own gradient buckets.

    None where it is no less than `below_s` without them.
    """
    rerun = search(
        replace(outcome.problem, memory_limit_bytes=UNLIMITED_BYTES),
        replace(settings, top=1, band_ratio=0.0, below_s=below_s),
    )
    ranking = rank_by_simulation(
        rerun, time_limit_s=settings.time_limit_s / 8.0, clock=settings.clock
    )
    if not ranking.objective_s:
        return None
    usual = price_solution(rerun, ranking.order[0])
    return ranking.objective_s[0] - saved_s(usual, with_best_bucket(rerun.problem, usual)[1])


def _time_notes(step_s_of: Mapping[str, float | None]) -> Iterator[str]:
    """Name the features that were not searched."""
    skipped = [feature for feature, step_s in step_s_of.items() if step_s == NOT_SEARCHED]
    if skipped:
        yield f"--time-limit left no time to search what these would gain: {', '.join(skipped)}"


def _choose(
    outcome: SearchOutcome, settings: SearchSettings, *, spec: Spec, priced_pool: PricedPool
) -> ChosenDecision:
    """Simulate the best rows, refine the layouts of the first, and choose near the fastest.

    All use the same devices, so failures reorder them only where checkpoints differ.
    """
    order = rank_by_simulation(
        outcome, time_limit_s=settings.time_limit_s / 8.0, clock=settings.clock
    ).order
    share_s = settings.time_limit_s / 8.0 / NUM_FINALISTS
    tried = {
        index: refine_finalist(outcome, index, time_limit_s=share_s)
        for index in order[:NUM_FINALISTS]
    }

    def wall_clock_s(detail: Detail, step_s: float) -> float:
        return effective_step_s(spec, priced_pool, detail, step_s=step_s)

    def effective_s(item: tuple[int, SimulatedRow]) -> float:
        return wall_clock_s(item[1].detail, item[1].step_s)

    index, chosen = min(tried.items(), key=effective_s)
    row, fastest = chosen.row, _to_priced(outcome, chosen)
    fastest_s = effective_s((index, chosen))

    def is_near(detail: Detail, step_s: float, most_ratio: float) -> bool:
        return wall_clock_s(detail, step_s) <= fastest_s * most_ratio

    def preferred_with(headroom: Headroom) -> Preferred | None:
        return choose_preferred(
            outcome,
            row,
            objective_s=fastest.objective_s,
            prices=loss_prices(spec.goal),
            simulate=simulated_s,
            is_near=is_near,
            headroom=headroom.searches,
        )

    preferred = preferred_with(NO_HEADROOM)
    full, step_s = row, fastest.objective_s
    if preferred is not None and preferred.step_s <= step_s * (1.0 + TOLERANCE_RATIO):
        full, step_s = preferred.row, preferred.step_s
    headroom = NO_HEADROOM
    if preferred is None or not has_enough_headroom(
        outcome, preferred, fastest_s=fastest.objective_s
    ):
        headroom = search_headroom(outcome, settings, full=full, step_s=step_s)
    if headroom.searches:
        preferred = preferred_with(headroom)
    if preferred is None:
        return ChosenDecision(
            chosen=fastest, fastest=fastest, order=order, index=index, headroom=headroom
        )
    return ChosenDecision(
        chosen=_to_priced(outcome, preferred),
        fastest=fastest,
        order=order,
        index=index,
        reasons=preferred.reasons,
        expected_s=preferred.expected_s,
        fastest_expected_s=preferred.fastest_expected_s,
        headroom=headroom,
    )


def _to_priced(outcome: SearchOutcome, simulated: SimulatedRow) -> PricedDecision:
    row, detail = simulated.row, simulated.detail
    objective_s = max(number(detail.step.step_s), simulated.simulated_s)
    bucket, with_bucket = with_best_bucket(outcome.problem, detail)
    saved = saved_s(detail, with_bucket)
    return PricedDecision(
        decision=TrainDecision.model_validate(
            solution_fields(replace(outcome, solutions=row), 0) | {"ddp_bucket_size": bucket}
        ),
        candidate=row.candidates,
        detail=with_bucket,
        objective_s=objective_s,
        simulated_s=simulated.simulated_s - saved,
        note="" if bucket is None else bucket_note(bucket, objective_s=objective_s, saved=saved),
    )


def _connection_notes(decision: TrainDecision, priced_pool: PricedPool) -> Iterator[str]:
    """Repeat a warning of Megatron-LM: two overlaps that want opposite launch queues.

    Source: megatron/training/arguments.py of core_v0.19.0, for devices before Blackwell.
    """
    is_old = priced_pool.sheet.generation in (Generation.AMPERE, Generation.ADA, Generation.HOPPER)
    if overlaps_contend(decision) and is_old:
        yield (
            "overlapped all-to-all wants a large CUDA_DEVICE_MAX_CONNECTIONS, tensor and context"
            " parallelism want 1 before Blackwell: try 1 and 32; the price assumes that neither"
            " slows the step"
        )
