"""Least-loaded dispatch, which no engine has: its requirements on a goal.

LLEP (arXiv 2601.17111) does not change the model's output, but no supported release applies it:
SGLang 0.5.23, vLLM 0.33.0, vllm-ascend 182b75e, TensorRT-LLM's ep_load_balancer and Megatron Core
d98e8a6 were read. A plan says what a runtime with the rule would gain; no engine files are written
for it, except EPLB's arrays, which are a table and no engine.
"""

from collections.abc import Sequence
from typing import Final

from tuner.spec.place import Dispatch, Objective, PlaceGoal

TABLES: Final = frozenset({"eplb"})
"""Targets that are expert tables for any reader."""


def least_loaded_refusal(
    goal: PlaceGoal, *, emit: Sequence[str], num_slots: int, num_experts: int
) -> str | None:
    """Say in a line why a goal cannot have the rule; None if it can, or has another."""
    if goal.dispatch is not Dispatch.LEAST_LOADED:
        return None
    engines = [name for name in emit if name not in TABLES]
    if engines:
        return (
            f"goal.dispatch: least_loaded is in no release of {', '.join(engines)}; set emit: []"
            " to plan what a runtime with it would gain, or another rule"
        )
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
