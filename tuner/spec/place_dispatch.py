"""Dispatch rules that no engine has: what they ask of a goal, and where they may stand in a spec.

LLEP (arXiv 2601.17111) and Janus' scheduler (arXiv 2512.13525) change no answer of the model, but
no release that placements are written for applies them: SGLang 0.5.23, vLLM 0.33.0, vllm-ascend
182b75e, TensorRT-LLM's ep_load_balancer and Megatron Core d98e8a6 were read. A plan says what a
runtime with such a rule would gain; it is written for none of them, an array of EPLB apart, which
is a table and no engine.
"""

from collections.abc import Sequence
from typing import Final

from tuner.spec.place import Dispatch, Objective, PlaceGoal

UNLAUNCHED: Final = frozenset({Dispatch.LEAST_LOADED, Dispatch.ACTIVATED})
"""Rules of no engine."""

TABLES: Final = frozenset({"eplb"})
"""Targets that are a table of experts, whatever reads it."""


def unlaunched_refusal(
    goal: PlaceGoal, *, emit: Sequence[str], num_slots: int, num_experts: int
) -> str | None:
    """Say in a line why a goal cannot have a rule that no engine has; None: it can."""
    rule = goal.dispatch
    if rule not in UNLAUNCHED or rule is None:
        return None
    engines = [name for name in emit if name not in TABLES]
    if engines:
        return (
            f"goal.dispatch: {rule.value} is in no release of {', '.join(engines)}; set emit: []"
            " to plan what a runtime with it would gain, or another rule"
        )
    if rule is Dispatch.ACTIVATED:
        return _activated_refusal(goal)
    return _least_loaded_refusal(goal, num_slots=num_slots, num_experts=num_experts)


def _activated_refusal(goal: PlaceGoal) -> str | None:
    if goal.objective is Objective.LAYER_TIME and goal.phase == "decode":
        return None
    return (
        "goal.dispatch: activated spreads the experts that are read and not the tokens, which"
        f" counts in decode only; set objective: layer_time and phase: decode (here"
        f" {goal.objective.value}, {goal.phase})"
    )


def _least_loaded_refusal(goal: PlaceGoal, *, num_slots: int, num_experts: int) -> str | None:
    if goal.objective not in (Objective.BALANCE, Objective.LAYER_TIME):
        return (
            "goal.dispatch: least_loaded takes tokens away from where their experts stand, which"
            f" objective {goal.objective.value} is about; plan for balance or layer_time"
        )
    if num_slots != num_experts:
        return (
            f"goal.dispatch: least_loaded copies experts itself, and {num_slots} slots hold"
            f" {num_experts} experts; set redundant_experts to 0"
        )
    if goal.rank_speeds is not None and len(set(goal.rank_speeds)) > 1:
        return (
            "goal.dispatch: least_loaded takes ranks as alike, and goal.rank_speeds tells them"
            " apart; drop one of the two"
        )
    return None
