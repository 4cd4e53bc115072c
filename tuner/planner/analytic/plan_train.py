"""From a spec on described devices to a plan: ask, search, refine the best, say what is proven.

The search ranks rows by the closed form of a step; the best of them are played pass by pass, and
the objective is the longer of the two (finalists.py). The integer program may move layers and
recomputation of the very best; what it finds is priced and played like everything else. Beside the
fastest stand others that the model cannot tell apart; one of them may be preferred (preference.py).

What would help (nodes, memory, what targets lack) is searched for after that. These searches share
one more time limit, of which the ways out of memory have the first half.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tuner.costs.analytic.memory import price_memory
from tuner.costs.analytic.shapes import number
from tuner.devices.datasheet import Generation
from tuner.plan import (
    Plan,
    Provenance,
    Relaxation,
    TrainDecision,
    TrainPrediction,
    Unlaunchable,
)
from tuner.planner.analytic.build_problem import Site, question_of
from tuner.planner.analytic.extrapolation import provenance_of, weighed
from tuner.planner.analytic.finalists import Finalist, finalist, played_s, ranked, unsettled_notes
from tuner.planner.analytic.gradient_buckets import bucket_note, saved_s, with_best_bucket
from tuner.planner.analytic.headroom_offers import more_room
from tuner.planner.analytic.headroom_search import NO_ROOMS, Rooms, has_room_enough, roomy_searches
from tuner.planner.analytic.incumbents import Found, Search
from tuner.planner.analytic.memory_risk import LIKELY, SMALL, loss_prices
from tuner.planner.analytic.more_nodes import more_nodes
from tuner.planner.analytic.plan_fields import Best, Choice, Teller, effective_step_s
from tuner.planner.analytic.preference import TOLERANCE_RATIO, Preferred, preferred
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.regimes import band_for
from tuner.planner.analytic.relaxations import (
    MEMORY_LIMIT,
    NOT_ASKED,
    feature_tasks,
    relaxations,
    unlaunchable,
)
from tuner.planner.analytic.releases import priced_release
from tuner.planner.analytic.search import Settings, search
from tuner.planner.analytic.search_result import (
    Detail,
    certificate_of,
    decision_of,
    detail_of,
)
from tuner.planner.analytic.ties import NO_TIES, ratios_on, ties_of
from tuner.planner.forked import numbers
from tuner.planner.layout_groups import by_layout
from tuner.planner.progress import Told, unwatched
from tuner.planner.reasons import binding_constraint, what_is_not_known
from tuner.spec.cluster import Pool
from tuner.spec.spec import Spec
from tuner.units import format_bytes

UNLIMITED_BYTES = 2.0**50
"""More memory than any device has."""

NUM_FINALISTS = 3
"""Rows whose layout the integer program looks at again."""


def make_analytic_plan(
    spec: Spec,
    site: Site,
    *,
    settings: Settings,
    provenance: Provenance,
    with_unlaunchable: bool = True,
) -> Plan:
    """Plan a training run from device descriptions.

    What the targets lack is searched for, feature by feature, unless `with_unlaunchable` is False.

    Raises:
        SpecError: the spec asks for what no device or target can do.
    """
    question = question_of(spec, site)
    precision = spec.goal.precision.value
    priced = priced_release(spec.emit, spec.goal.engine, site.residuals)
    band = band_for(
        spec.emit, site.sheet, site.residuals, precision=precision, release=priced.stated
    )
    settings = replace(settings, band_ratio=max(settings.band_ratio, TOLERANCE_RATIO))
    watch, settings = settings.watch, replace(settings, watch=unwatched)
    found = search(question, replace(settings, watch=watch))
    notes: tuple[str, ...] = (priced.note,) if priced.note else ()
    if found.found is None and spec.search != question.limits:
        watch(Told(stage="search", text="nothing fits; once more with offloading"))
        found = search(replace(question, limits=spec.search), settings)
        if found.found is not None:
            notes += ("fits only with offloading or dropped tokens, which no published run prices",)
    if found.found is not None:
        watch(Told(stage="choice", text="the best are played pass by pass, and put in order"))
    choice = None if found.found is None else _choice(found, settings, spec=spec, site=site)
    best = None if choice is None else choice.chosen
    if best is not None and (best.decision.optimizer_offload or best.decision.activation_offload):
        notes += (_host_note(question, best.detail, site.pool),)
    if best is not None:
        notes += (
            *_connection_notes(best.decision, site),
            *filter(None, (best.note,)),
            *unsettled_notes(best.detail),
        )
    rests_on = None if best is None else weighed(found, best.candidate, best.detail.stages)
    ratios = ratios_on(spec, site, band=band)
    if rests_on is not None:
        band, ratios = rests_on.widened(band), ratios.widened(rests_on.stretch)
    teller = Teller(spec=spec, site=site, search=found, band=band, ratios=ratios)
    certificate = certificate_of(
        found,
        ties=(
            NO_TIES
            if best is None
            else ties_of(found, ratios, chosen=best.decision, step_s=best.objective_s)
        ),
        objective_s=None if choice is None else choice.fastest.objective_s,
        decision_s=(None if choice is None or choice.is_fastest else choice.chosen.objective_s),
    )
    told = provenance_of(
        provenance.model_copy(update={"notes": provenance.notes + notes}), question, rests_on
    )
    common = {
        "model": spec.model,
        "cluster": spec.cluster,
        "goal": spec.goal,
        "search": spec.search,
        "emit": spec.emit,
        "certificate": certificate,
        "provenance": told,
    }
    if choice is None or best is None:
        watch(Told(stage="ways out", text="nothing fits; looking for what would"))
        begun_s = settings.clock()
        half = replace(settings, time_limit_s=settings.time_limit_s / 2.0)
        predict = partial(_predict_best, teller)
        ways_out = relaxations(question, half, predict=predict)
        in_the_way = ", ".join(one.limit for one in ways_out)
        if in_the_way == MEMORY_LIMIT:
            left = settings.since(begun_s)
            ways_out = (*more_nodes(spec, site, settings=left, band=band), *ways_out)
        not_known = what_is_not_known(certificate, time_limit_s=settings.time_limit_s)
        return Plan.model_validate(
            common
            | {
                "decision": None,
                "predicted": None,
                "binding_constraint": not_known or in_the_way,
                "alternatives": (),
                "relaxations": ways_out,
            }
        )
    begun_s = settings.clock()
    predicted = teller.told(best)
    room = teller.roomier(choice)
    is_full = (predicted.out_of_memory_probability or 0.0) > SMALL
    room_out: tuple[Relaxation, ...] = ()
    if (predicted.out_of_memory_probability or 0.0) > LIKELY and choice.rooms.room_ratio:
        watch(Told(stage="ways out", text="looking for nodes or memory with more room"))
        ratio = choice.rooms.room_ratio
        half = replace(settings, time_limit_s=settings.time_limit_s / 2.0)
        room_out = more_room(spec, site, room_ratio=ratio, settings=half, band=band)
    unlimited_s, lacking, not_asked = _beyond(
        found,
        replace(settings.since(begun_s), watch=watch),
        below_s=choice.fastest.objective_s,
        with_unlaunchable=with_unlaunchable,
    )
    return Plan.model_validate(
        common
        | {
            "provenance": told.model_copy(update={"notes": told.notes + _time_notes(not_asked)}),
            "decision": best.decision,
            "predicted": predicted,
            "relaxations": room_out,
            "preferred": teller.preference(choice, room),
            "roomier": room,
            "roomier_within_ratio": choice.searched_ratio,
            "no_roomier": is_full and room is None and choice.has_searched_all,
            "binding_constraint": binding_constraint(
                teller.told(choice.fastest),
                unlimited_s=unlimited_s,
                memory_limit_bytes=int(question.memory_limit_bytes),
            ),
            **by_layout(best.decision, teller.alternatives(choice, top=settings.top)),
            "pareto": teller.pareto(),
            "unlaunchable": lacking,
        }
    )


def _predict_best(teller: Teller, found: Search) -> TrainPrediction:
    """Say what is expected of the best decision of another search."""
    return replace(teller, search=found).prediction(detail_of(found, 0))


def _beyond(
    found: Search, settings: Settings, *, below_s: float, with_unlaunchable: bool
) -> tuple[float | None, tuple[Unlaunchable, ...], tuple[str, ...]]:
    """Search without the memory limit and with what the targets lack, side by side.

    Returns:
        Seconds of the fastest step in any memory with its own buckets of gradients, where it is
        less than `below_s` without them, features that would gain, and those that there was no time
        to search for.
    """
    unlimited = replace(found.question, memory_limit_bytes=UNLIMITED_BYTES)
    quiet = replace(settings, top=1, band_ratio=0.0, below_s=below_s, watch=unwatched)

    def unlimited_s() -> float | None:
        again = search(unlimited, quiet)
        played = ranked(again, time_limit_s=settings.time_limit_s / 8.0, clock=settings.clock)
        if not played.objective_s:
            return None
        usual = detail_of(again, played.order[0])
        saved = saved_s(usual, with_best_bucket(again.question, usual)[1])
        return played.objective_s[0] - saved

    features = feature_tasks(found, settings) if with_unlaunchable else {}

    def tell(index: int) -> None:
        if index == 0:
            settings.watch(Told(stage="memory", text="searching once more without its limit"))
            return
        text = f"{index - 1} of {len(features)} that they lack: {list(features)[index - 1]}"
        settings.watch(Told(stage="targets", text=text, is_passing=True))

    memory_s, *step_s = numbers(
        (unlimited_s, *features.values()),
        processes=settings.processes,
        patience_s=settings.time_limit_s,
        starting=tell,
    )
    if not with_unlaunchable:
        return memory_s, (), ()
    step_s_of = dict(zip(features, step_s, strict=True))
    not_asked = tuple(feature for feature, one in step_s_of.items() if one == NOT_ASKED)
    return memory_s, unlaunchable(found, step_s_of), not_asked


def _time_notes(not_asked: Sequence[str]) -> tuple[str, ...]:
    """Say which features were not searched for."""
    if not not_asked:
        return ()
    return (
        f"within --time-limit it was not searched what these would gain: {', '.join(not_asked)}",
    )


def _choice(found: Search, settings: Settings, *, spec: Spec, site: Site) -> Choice:
    """Play the best rows, refine the layout of the very best, and choose near the fastest of them.

    All use the same devices, so failures reorder them only where checkpoints differ.
    """
    order = ranked(found, time_limit_s=settings.time_limit_s / 8.0, clock=settings.clock).order
    share_s = settings.time_limit_s / 8.0 / NUM_FINALISTS
    tried = {index: finalist(found, index, time_limit_s=share_s) for index in order[:NUM_FINALISTS]}

    def wall_clock_s(detail: Detail, step_s: float) -> float:
        return effective_step_s(spec, site, detail, step_s=step_s)

    def effective_s(item: tuple[int, Finalist]) -> float:
        return wall_clock_s(item[1].detail, max(item[1].step_s, item[1].played_s))

    index, chosen = min(tried.items(), key=effective_s)
    row = _row_of(chosen)
    fastest = _best(found, row, chosen.detail, played_s=chosen.played_s)
    fastest_s = effective_s((index, chosen))

    def is_near(detail: Detail, step_s: float, most_ratio: float) -> bool:
        return wall_clock_s(detail, step_s) <= fastest_s * most_ratio

    def preferred_with(rooms: Rooms) -> Preferred | None:
        return preferred(
            found,
            row,
            objective_s=fastest.objective_s,
            prices=loss_prices(spec.goal),
            play=played_s,
            is_near=is_near,
            rooms=rooms.searches,
        )

    other = preferred_with(NO_ROOMS)
    full, step_s = row, fastest.objective_s
    if other is not None and other.step_s <= step_s * (1.0 + TOLERANCE_RATIO):
        full, step_s = other.row, other.step_s
    rooms = NO_ROOMS
    if other is None or not has_room_enough(found, other, fastest_s=fastest.objective_s):
        rooms = roomy_searches(found, settings, full=full, step_s=step_s)
    if rooms.searches:
        other = preferred_with(rooms)
    if other is None:
        return Choice(chosen=fastest, fastest=fastest, order=order, index=index, rooms=rooms)
    return Choice(
        chosen=_best(found, other.row, other.detail, played_s=other.played_s),
        fastest=fastest,
        order=order,
        index=index,
        reasons=other.reasons,
        expected_s=other.expected_s,
        fastest_expected_s=other.fastest_expected_s,
        rooms=rooms,
    )


def _best(found: Search, row: Found, detail: Detail, *, played_s: float) -> Best:
    bucket, own = with_best_bucket(found.question, detail)
    saved = saved_s(detail, own)
    objective_s = max(number(detail.step.step_s), played_s)
    return Best(
        decision=TrainDecision.model_validate(
            decision_of(replace(found, found=row), 0) | {"ddp_bucket_size": bucket}
        ),
        candidate=row.candidates,
        detail=own,
        objective_s=objective_s,
        played_s=played_s - saved,
        note="" if bucket is None else bucket_note(bucket, objective_s=objective_s, saved=saved),
    )


def _row_of(chosen: Finalist) -> Found:
    """A finalist's degrees, its own layout and recomputation."""
    pipeline = int(chosen.candidate.rows["pipeline"][0])
    layers_S = np.array(chosen.layers_S)
    return Found(
        candidates=chosen.candidate,
        step_s=np.array([chosen.step_s]),
        peak_bytes=np.array([float(chosen.detail.memory.total_PC.max())]),
        layers_PC=layers_S.reshape(-1, pipeline).sum(axis=0)[:, None],
    )


def _connection_notes(decision: TrainDecision, site: Site) -> Iterator[str]:
    """Repeat what Megatron-LM warns of: two overlaps that want opposite launch queues.

    Source: megatron/training/arguments.py of core_v0.19.0, for devices before Blackwell.
    """
    is_cut = decision.tensor_model_parallel_size > 1 or decision.context_parallel_size > 1
    is_old = site.sheet.generation in (Generation.AMPERE, Generation.ADA, Generation.HOPPER)
    if decision.a2a_overlap and is_cut and is_old:
        yield (
            "overlapped all-to-all wants a large CUDA_DEVICE_MAX_CONNECTIONS, tensor and context"
            " parallelism want 1 before Blackwell: try 1 and 32; the price assumes that neither"
            " slows the step"
        )


def _host_note(question: Question, detail: Detail, pool: Pool) -> str:
    """Say what offloading asks of host memory, whose size no datasheet states."""
    kept = replace(detail.strategies, optimizer_offload=0.0, activation_offload=0.0)
    whole = price_memory(
        question.shape,
        kept,
        question.hardware,
        detail.stages,
        constants=question.memory_constants,
    )
    moved_PC = whole.optimizer_PC + whole.activations_PC
    moved_PC = moved_PC - detail.memory.optimizer_PC - detail.memory.activations_PC
    node_bytes = int(float(moved_PC.max()) * pool.devices_per_node)
    return (
        f"offloading needs {format_bytes(node_bytes)} of free host memory on each node, which the"
        " cluster does not state and the plan does not check"
    )
