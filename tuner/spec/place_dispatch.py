"""Dispatch rules that no engine has: their requirements on a goal, and where a spec may use them.

LLEP (arXiv 2601.17111) and Janus' scheduler (arXiv 2512.13525) do not change the model's output,
but no supported release applies them: SGLang 0.5.23, vLLM 0.33.0, vllm-ascend 182b75e,
TensorRT-LLM's ep_load_balancer and Megatron Core d98e8a6 were read. A plan says what a runtime with
such a rule would gain; no engine files are written for it, except EPLB's arrays, which are a table
and no engine.
"""

from collections.abc import Sequence
from typing import Final

from tuner.spec.place import Dispatch, Objective, PlaceGoal

UNLAUNCHED: Final = frozenset({Dispatch.LEAST_LOADED, Dispatch.ACTIVATED})
"""Rules that no engine has."""

TABLES: Final = frozenset({"eplb"})
"""Targets that are expert tables for any reader."""


def unlaunched_refusal(
    goal: PlaceGoal, *, emit: Sequence[str], num_slots: int, num_experts: int
) -> str | None:
    """Say in a line why a goal cannot have a rule that no engine has; None if it can."""
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
        "goal.dispatch: activated balances active experts and not tokens, which"
        f" matters in decode only; set objective: layer_time and phase: decode (here"
        f" {goal.objective.value}, {goal.phase})"
    )


def _least_loaded_refusal(goal: PlaceGoal, *, num_slots: int, num_experts: int) -> str | None:
    if goal.objective not in (Objective.BALANCE, Objective.LAYER_TIME):
        return (
            "goal.dispatch: least_loaded moves tokens away from the ranks of their experts, which"
            f" objective {goal.objective.value} minimises; plan for balance or layer_time"
        )
    if num_slots != num_experts:
        return (
            f"goal.dispatch: least_loaded copies experts itself, and {num_slots} slots hold"
            f" {num_experts} experts; set redundant_experts to 0"
        )
    if goal.rank_speeds is not None and len(set(goal.rank_speeds)) > 1:
        return (
            "goal.dispatch: least_loaded assumes equal ranks, and goal.rank_speeds are"
            " different; drop one of the two"
        )
    return None
