"""Choices of a decision that the targets do not allow, named in words by the rules they break.

Targets often have a feature only under conditions. So a decision that was searched with a feature
added is checked against the manifest as it is, and the choices of each broken rule are named
together: "partial CUDA graphs with full recomputation".
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from profilers.steps.config import Recompute
from tuner.config.knobs import SWITCH, searched
from tuner.search.train.options import Choice, Facts, OptionRule, RecomputeChoice, option_space
from tuner.search.train.problem import TrainProblem
from tuner.search.train.rules import dense_rules, expert_rules, schedule_rules
from tuner.search.train.search_result import SearchOutcome
from tuner.search.train.space_size import by_facts
from tuner.units import format_ratio

_ON: Final = {knob.field: knob.words for knob in searched() if knob.choices == SWITCH}
_GRAPHS: Final[Mapping[str, str]] = {
    "none": "no CUDA graphs",
    "partial": "partial CUDA graphs",
    "full_iteration": "CUDA graphs of a whole step",
}


def refused_choices(outcome: SearchOutcome, problem: TrainProblem) -> tuple[str, ...]:
    """Name the choices of the best decision that another problem's rules refuse; empty if none."""
    if outcome.solutions is None:
        return ()
    best = outcome.solutions.taken(np.array([0])).candidates
    ((facts, _),) = by_facts(best.rows)
    chosen = {
        axis: choices[int(best.options[axis][0])]
        for axis, choices in outcome.options.choices.items()
    }
    rules = (*dense_rules(problem), *expert_rules(problem), *schedule_rules(problem))
    degrees = [rule.text for rule in rules if bool(rule.broken(best.rows)[0])]
    options = [
        _words(rule, facts, chosen)
        for rule in option_space(problem).rules
        if rule.is_broken(facts, *(chosen[axis] for axis in rule.axes))
    ]
    return tuple(dict.fromkeys((*degrees, *options)))


def _words(rule: OptionRule, facts: Facts, chosen: Mapping[str, Choice]) -> str:
    """Name the choices that a rule ties together, and the degrees where these matter."""
    named = [_choice(axis, chosen[axis]) for axis in reversed(rule.axes)]
    said = " with ".join(filter(None, named))
    return " ".join((said, *_degrees(rule, facts, chosen)))


def _degrees(rule: OptionRule, facts: Facts, chosen: Mapping[str, Choice]) -> Iterator[str]:
    """Say which degrees break the rule."""

    def is_free(**changed: bool) -> bool:
        choices = (chosen[axis] for axis in rule.axes)
        return not rule.is_broken(replace(facts, **changed), *choices)

    if facts.has_pipeline and is_free(has_pipeline=False):
        is_plain = not facts.has_virtual and is_free(has_virtual=True)
        yield "in a pipeline that is not interleaved" if is_plain else "in a pipeline"
    elif not facts.has_pipeline and is_free(has_pipeline=True):
        yield "without a pipeline"
    if facts.has_tensor and is_free(has_tensor=False):
        yield "under tensor parallelism"
    if facts.spans_replicas and is_free(spans_replicas=False):
        yield "with experts spread over replicas"


def _choice(axis: str, choice: Choice) -> str:
    """Name a choice; empty for a switch that is off."""
    if isinstance(choice, RecomputeChoice):
        return _recomputed(choice)
    if axis in _ON:
        return _ON[axis] if choice else ""
    if axis == "cuda_graph":
        return _GRAPHS[str(choice)]
    if axis == "sharding":
        return "training state sharded over part of the ranks" if choice == "domain" else ""
    named = {"zero_stage": f"ZeRO {choice}", "schedule": f"the {choice} schedule"}
    return named.get(axis) or (f"{choice} chunks" if axis == "chunks" else f"{axis} {choice}")


def _recomputed(choice: RecomputeChoice) -> str:
    if choice.level is Recompute.FULL:
        part = (
            ""
            if choice.share == 1.0
            else f" of {format_ratio(choice.share, digits=0)} of the layers"
        )
        return f"full recomputation{part}"
    if choice.level is Recompute.SELECTIVE:
        return f"recomputation of {'+'.join(sorted(choice.modules))}"
    return "no recomputation"
