"""The dispatch rule assumed for an engine, and notes on a plan's other assumptions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tuner.engines.place_capabilities import PLACE_TARGETS
from tuner.engines.place_rules import dispatch_offers, launch_backend
from tuner.search.place.candidates import EplbBaseline
from tuner.search.place.cross_validation import MOST_FOLDS
from tuner.search.place.dispatch_choice import made_for
from tuner.search.place.evidence import WorkloadEvidence
from tuner.search.place.transitions import has_holdout_transitions
from tuner.spec.place import Dispatch, Objective
from tuner.spec.place_read import PlaceSpec

NEAR_FIRST: Final = frozenset({"static", "near_dynamic", "near_lp"})
"""Rules that send tokens to a replica on their own rank or node where there is one."""


RULE_WORDS: Final[Mapping[str, str]] = {
    "near_dynamic": "'dynamic' with near replicas first",
    "near_lp": "'lp' with near replicas first",
}
"""Rules whose names in the solvers and the engine differ."""


def planned_dispatch(spec: PlaceSpec) -> str:
    """Return the dispatch rule that a plan is solved for, by the solvers' name.

    The goal's rule, as the first target runs it with the deployment's backend. If the goal names
    none and several are offered, a draw per token: no load-blind rule has lower expected loads,
    fixed tables only vary around them. Otherwise the target's own rule.
    """
    name = next(iter(spec.emit), "eplb")
    target, goal = PLACE_TARGETS[name], spec.goal
    said = None if goal.dispatch is None else goal.dispatch.value
    if target.offers and said != "even":
        backend = launch_backend(target, dispatch=said, a2a_backend=goal.a2a_backend)
        offers = dispatch_offers(target, said, backend)
        return next((one for one in offers if one.name == "dynamic"), offers[0]).rule
    return said or target.default_dispatch


def assumption_notes(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], dispatch: str, baseline: EplbBaseline
) -> tuple[str, ...]:
    """Return a plan's assumptions, one line each."""
    return (
        *_dispatch_notes(spec, dispatch),
        f"EPLB baseline: its {'hierarchical' if 'hier' in baseline.name else 'global'} policy",
        *_recording_notes(evidence),
        *_layer_notes(spec),
        *_judging_notes(spec, evidence),
    )


def _dispatch_notes(spec: PlaceSpec, dispatch: str) -> Iterator[str]:
    if spec.goal.dispatch is Dispatch.LEAST_LOADED or spec.ranks.num_slots == spec.num_experts:
        # Without replicas all rules are the same.
        return
    said = RULE_WORDS.get(dispatch, repr(dispatch))
    yield f"replicas share tokens by the rule {said}, {_whose_dispatch(spec)}"
    for mark in made_for(spec, dispatch):
        if not mark.is_judged:
            runs = f"dispatch {mark.dispatch}" if mark.dispatch else "an even split"
            yield f"{mark.engine} runs {runs}, under which nothing was evaluated here"
    if dispatch in NEAR_FIRST:
        yield "placed and evaluated as if every rank sent equally many tokens to each expert"
    for cost in sorted(_costs(spec, dispatch)):
        yield f"loads and seconds leave out what the rule costs at run time: {cost}"


def _costs(spec: PlaceSpec, dispatch: str) -> set[str]:
    offers = PLACE_TARGETS[next(iter(spec.emit), "eplb")].offers
    return {offer.cost for offer in offers if offer.rule == dispatch and offer.cost}


def _recording_notes(evidence: Sequence[WorkloadEvidence]) -> Iterator[str]:
    whole = [one.name for one in evidence if not one.is_split]
    if whole:
        yield (
            f"{', '.join(whole)}: one pass recorded, so token copies were split at random into fit"
            " and hold-out; how passes differ is not known"
        )
    for one in evidence:
        unseen = int((one.whole_PLE.sum(axis=0) == 0.0).sum())
        if unseen:
            yield f"{one.name}: {unseen} experts of all layers were never chosen"
        if one.passes_left_out:
            yield (
                f"{one.name}: {one.passes_left_out} passes in which some layer saw no token are"
                " left out"
            )


def _layer_notes(spec: PlaceSpec) -> Iterator[str]:
    """Note the source of the number of decoder layers, for files with a row for each of them."""
    needed = [name for name in spec.emit if PLACE_TARGETS[name].all_layers]
    if not needed or spec.model is not None:
        return
    if any(one.num_decoder_layers is not None for one in spec.recordings.values()):
        yield f"{needed[0]}: a row for each of the {spec.num_layers} decoder layers recorded"
        return
    yield (
        f"{needed[0]}: the {spec.num_layers} layers recorded are taken for all decoder layers; name"
        " `model` where it has others"
    )


def _judging_notes(spec: PlaceSpec, evidence: Sequence[WorkloadEvidence]) -> Iterator[str]:
    if spec.goal.objective is Objective.LAYER_CHAIN:
        summed = [one.name for one in evidence if not has_holdout_transitions(one)]
        if summed:
            yield (
                f"{', '.join(summed)}: transitions are kept summed over all passes, so traffic is"
                " evaluated on what it was planned from"
            )
        if spec.cluster is not None and spec.model is not None:
            yield "expert layers are not priced: tokens stay where their last expert was"
    if len(evidence) > MOST_FOLDS:
        yield f"of {len(evidence)} workloads the first {MOST_FOLDS} were left out in turn"
    if len(evidence) == 1:
        yield "one workload: how the plan does on another one is not known"


def _whose_dispatch(spec: PlaceSpec) -> str:
    if spec.goal.dispatch is not None:
        return "as the goal says"
    if not spec.emit:
        return "as EPLB assumes"
    chosen = PLACE_TARGETS[spec.emit[0]].offers
    return (
        f"{'the best of those' if chosen else 'as'} {spec.emit[0]} {'runs' if chosen else 'does'}"
    )
