"""Notes on a plan's assumptions, one line each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tuner.plans.place import LeftOut
from tuner.search.place.dispatch_choice import made_for
from tuner.search.place.problem import PlaceProblem
from tuner.search.place.search import MOST_FOLDS
from tuner.search.place.verdict import Compared
from tuner.spec.place import Dispatch, Objective
from tuner.spec.place_method import Method
from tuner.spec.place_spec import PlaceSpec

NEAR_FIRST: Final = frozenset({"static", "near_dynamic", "near_lp"})
"""Rules that send tokens to a replica on their own rank or node where there is one."""

RULE_WORDS: Final[Mapping[str, str]] = {
    "near_dynamic": "'dynamic' with near replicas first",
    "near_lp": "'lp' with near replicas first",
}
"""Rules whose names in the solvers and the engine differ."""


def assumption_notes(
    problem: PlaceProblem, compared: Sequence[Compared], folds: Sequence[LeftOut]
) -> Iterator[str]:
    """Yield what a plan assumes of method, rule, baseline, recordings and workloads."""
    spec, method = problem.spec, problem.spec.goal.method
    if method is not Method.AUTO:
        yield f"method {method.value}, as the goal says, whatever auto would find"
    if spec.goal.dispatch is Dispatch.LEAST_LOADED:
        yield _weights_sent(problem, compared)
    elif spec.ranks.num_slots > spec.num_experts:
        # Without replicas all rules are the same.
        yield from _dispatch_notes(spec, problem.dispatch)
    is_grouped = "hier" in problem.baseline.name
    yield f"EPLB baseline: its {'hierarchical' if is_grouped else 'global'} policy"
    yield from _recording_notes(problem)
    yield from _layer_notes(spec)
    yield from _workload_notes(problem, folds)


def _dispatch_notes(spec: PlaceSpec, dispatch: str) -> Iterator[str]:
    target = next(iter(spec.targets.values()), None)
    if spec.goal.dispatch is not None:
        whose = "as the goal says"
    elif target is None:
        whose = "as EPLB assumes"
    else:
        whose = f"{'the best of those' if target.offers else 'as'} {target.name}"
        whose += " runs" if target.offers else " does"
    yield f"replicas share tokens by the rule {RULE_WORDS.get(dispatch, repr(dispatch))}, {whose}"
    for mark in made_for(spec, dispatch):
        if not mark.is_judged:
            runs = f"dispatch {mark.dispatch}" if mark.dispatch else "an even split"
            yield f"{mark.engine} runs {runs}, under which nothing was evaluated here"
    if dispatch in NEAR_FIRST:
        yield "placed and evaluated as if every rank sent equally many tokens to each expert"
    offers = () if target is None else target.offers
    for cost in sorted({offer.cost for offer in offers if offer.rule == dispatch and offer.cost}):
        yield f"loads and seconds leave out what the rule costs at run time: {cost}"


def _weights_sent(problem: PlaceProblem, compared: Sequence[Compared]) -> str:
    sent = sum(
        workload.weight_ratio * float(planned.loads.weights_PLG.max(axis=2).mean())
        for workload, (_, _, planned) in zip(problem.evidence, compared, strict=True)
        if planned.loads.weights_PLG is not None
    )
    counted = (
        "not counted; name `model` and `cluster` for it"
        if problem.pricing is None
        else "counted, after the all-to-all and not overlapped with it"
    )
    return (
        f"the most-loaded rank sends or gets the weights of {sent:.2f}"
        f" experts in a layer and pass by the rule 'least_loaded'; their transfer is {counted}"
    )


def _recording_notes(problem: PlaceProblem) -> Iterator[str]:
    whole = [workload.name for workload in problem.evidence if not workload.is_split]
    if whole:
        yield (
            f"{', '.join(whole)}: one pass recorded, so token copies were split at random into fit"
            " and hold-out; how passes differ is not known"
        )
    for workload in problem.evidence:
        unseen = int((workload.recording.count_LE == 0).sum())
        if unseen:
            yield f"{workload.name}: {unseen} experts of all layers were never chosen"
        if workload.passes_left_out:
            yield (
                f"{workload.name}: {workload.passes_left_out} passes in which some layer saw no"
                " token are left out"
            )


def _layer_notes(spec: PlaceSpec) -> Iterator[str]:
    """Note the source of the number of decoder layers, for files with a row for each of them."""
    needed = [name for name, target in spec.targets.items() if target.all_layers]
    if not needed or spec.model is not None:
        return
    if any(recording.num_decoder_layers is not None for recording in spec.recordings.values()):
        yield f"{needed[0]}: a row for each of the {spec.num_layers} decoder layers recorded"
        return
    yield (
        f"{needed[0]}: the {spec.num_layers} layers recorded are taken for all decoder layers; name"
        " `model` where it has others"
    )


def _workload_notes(problem: PlaceProblem, folds: Sequence[LeftOut]) -> Iterator[str]:
    spec, evidence = problem.spec, problem.evidence
    if spec.goal.objective is Objective.LAYER_CHAIN:
        summed = [workload.name for workload in evidence if not workload.has_holdout_transitions]
        if summed:
            yield (
                f"{', '.join(summed)}: transitions are kept summed over all passes, so traffic is"
                " evaluated on what it was planned from"
            )
        if spec.cluster is not None and spec.model is not None:
            yield "expert layers are not priced: tokens stay where their last expert was"
    if len(evidence) == 1:
        yield "one workload: how the plan does on another one is not known"
        return
    if len(evidence) > MOST_FOLDS:
        yield f"of {len(evidence)} workloads the first {MOST_FOLDS} were left out in turn"
    made = {fold.workload for fold in folds}
    missing = [
        repr(workload.name) for workload in evidence[:MOST_FOLDS] if workload.name not in made
    ]
    if missing:
        yield (
            f"no plan was made without {', '.join(missing)} in the time limit; give more with"
            " --time-limit"
        )
