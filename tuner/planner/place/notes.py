"""How an engine's dispatch is taken to be, and what else a plan should say that it rests on."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tuner.planner.place.candidates import Rule
from tuner.planner.place.comparing import sources_of
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.leaving_out import MOST_FOLDS
from tuner.planner.place.transitions import is_judged_apart
from tuner.spec.place import Dispatch, Objective
from tuner.spec.place_read import PlaceSpec

DISPATCH_OF: Final[Mapping[str, Dispatch]] = {
    "sglang": Dispatch.STATIC,
    "trtllm": Dispatch.EVEN,
    "vllm": Dispatch.EVEN,
    "vllm-ascend": Dispatch.EVEN,
    "eplb": Dispatch.EVEN,
    "megatron": Dispatch.EVEN,
}
"""What an engine does with replicas unless told otherwise: SGLang's default with an all-to-all
backend; vLLM and TensorRT-LLM go through replicas in turn."""


def dispatch_of(spec: PlaceSpec) -> str:
    """Return the dispatch rule that the plan is judged under."""
    named = next(iter(spec.emit), "eplb")
    return (spec.goal.dispatch or DISPATCH_OF[named]).value


def notes_of(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], dispatch: str, rule: Rule
) -> tuple[str, ...]:
    """Return what a plan rests on, a line each."""
    return (
        *_dispatch_notes(spec, evidence, dispatch),
        f"the rule beside is {rule.name}",
        *_recording_notes(evidence),
        *_judging_notes(spec, evidence),
    )


def _dispatch_notes(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], dispatch: str
) -> Iterator[str]:
    yield f"replicas share tokens by the rule {dispatch!r}, {_whose_dispatch(spec)}"
    if spec.goal.dispatch is None:
        for name in dict.fromkeys(spec.emit):
            if DISPATCH_OF[name].value != dispatch:
                yield f"{name} shares by {DISPATCH_OF[name].value!r}, not judged here"
    if dispatch == Dispatch.STATIC.value and any(sources_of(spec, one) is None for one in evidence):
        yield "tokens are taken to come from all ranks alike"


def _recording_notes(evidence: Sequence[WorkloadEvidence]) -> Iterator[str]:
    whole = [one.name for one in evidence if not one.is_split]
    if whole:
        yield (
            f"{', '.join(whole)}: one pass recorded, so token copies were parted by lot to plan"
            " from and to judge on; how passes differ is not known"
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


def _judging_notes(spec: PlaceSpec, evidence: Sequence[WorkloadEvidence]) -> Iterator[str]:
    if spec.goal.objective is Objective.LAYER_CHAIN:
        summed = [one.name for one in evidence if not is_judged_apart(one)]
        if summed:
            yield (
                f"{', '.join(summed)}: transitions are kept summed over all passes, so the way is"
                " judged on what it was planned from"
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
    return f"as {spec.emit[0]} does" if spec.emit else "as EPLB assumes"
