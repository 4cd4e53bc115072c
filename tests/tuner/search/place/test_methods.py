"""Methods that a goal names: each plans, is certified, and is told."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from profilers.routing.recording import Recording
from profilers.routing.store import write_recording
from solvers.registry import BALANCE, CHAIN, COACTIVATION
from tests.expect import present, refused
from tuner.errors import SpecError
from tuner.goals.place_plan import place
from tuner.plans.place import PlacePlan
from tuner.spec.place import Objective
from tuner.spec.place_method import FORMER, METHODS, Method

MODELS = Path(__file__).parents[4] / "examples" / "models"

MACHINE = f"""\
model: {MODELS / "mixtral-8x7b" / "config.json"}
cluster:
  pools: [{{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 8}}]
"""

Plan = Callable[..., PlacePlan]


def recorded(
    folder: Path, name: str, *, seed: int, layers: int = 3, experts: int = 8, top_k: int = 2
) -> None:
    """Passes of tokens whose choices follow skewed shares, each layer's after the one before."""
    rng = np.random.default_rng(seed)
    share_LE = np.exp(0.7 * rng.standard_normal((layers, experts)))
    tokens = 600
    token_LTK = np.array(
        [
            np.argsort(-np.log(share_E) - rng.gumbel(size=(tokens, experts)), axis=1)[:, :top_k]
            for share_E in 1.0 / share_LE
        ],
        dtype=np.int32,
    )
    chosen_LTE = (token_LTK[..., None] == np.arange(experts)).any(axis=2)
    count_PLE = np.stack([part.sum(axis=1) for part in np.array_split(chosen_LTE, 6, axis=1)])
    flow_MEE = chosen_LTE[:-1].transpose(0, 2, 1).astype(float) @ chosen_LTE[1:].astype(float)
    write_recording(
        folder / name,
        Recording(
            model="tiny",
            workload=name,
            layer_ids=tuple(range(layers)),
            top_k=top_k,
            count_PLE=count_PLE.astype(np.int64),
            transition_MEE=flow_MEE,
            token_LTK=token_LTK,
        ),
    )


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Plan a goal on two small recordings."""
    for seed, name in enumerate(("chat", "code")):
        recorded(tmp_path, name, seed=seed)

    def made(goal: str, *, head: str = "", emit: str = "[eplb]", limit_s: float = 1.0) -> PlacePlan:
        path = tmp_path / "spec.yaml"
        path.write_text(
            f"schema_version: 1\n{head}goal:\n  kind: place\n"
            "  workloads: [{name: chat, path: chat}, {name: code, path: code}]\n"
            f"{goal}emit: {emit}\n"
        )
        return place(path, time_limit_s=limit_s).plan

    return made


@pytest.mark.slow
def test_every_method_of_every_objective_plans_and_is_certified(plan: Plan) -> None:
    wrong = []
    for objective, legal in METHODS.items():
        head = MACHINE if objective == "layer_time" else ""
        size = "  tokens_per_pass: 800\n" if head else ""
        goal = f"  objective: {objective}\n  ranks: 4\n  ranks_per_node: 2\n{size}"
        if head:
            goal = goal.replace("ranks_per_node: 2", "ranks_per_node: 4")
        least = plan(goal, head=head).certificate
        for method in legal:
            found = plan(f"{goal}  method: {method.value}\n", head=head, limit_s=3.0)
            proven = found.certificate
            assert found.decision is not None
            named = [note for note in found.provenance.notes if note.startswith("method ")]
            checks = {
                "method": method is Method.AUTO or proven.method == method.value,
                "bound": present(proven.bound) <= present(proven.objective),
                # No bound on any method's placement passes what another one found.
                "true bound": present(proven.bound) <= present(least.objective) * (1.0 + 1e-6),
                "told": len(named) == (method is not Method.AUTO),
            }
            wrong += [
                (objective, method.value, name) for name, holds in checks.items() if not holds
            ]
    assert not wrong


def test_methods_of_papers_serve_the_objectives_that_the_papers_state(plan: Plan) -> None:
    # MoETuner's busiest pair of ranks, and HierMoE's busiest group.
    for objective, method in (("layer_chain", Method.MOETUNER), ("co_activation", Method.SWAPS)):
        goal = f"  objective: {objective}\n  traffic: busiest\n  ranks: 2\n  ranks_per_node: 1\n"
        least = present(plan(goal).certificate.objective)
        found = plan(f"{goal}  method: {method.value}\n").certificate
        assert found.method == method.value
        assert 0.0 < present(found.bound) <= least * (1.0 + 1e-6)


def test_every_method_has_a_solver_and_serves_an_objective() -> None:
    served = {method for legal in METHODS.values() for method in legal}
    assert served == set(Method)
    solvers = {"co_activation": COACTIVATION.methods, "layer_chain": CHAIN.methods}
    for objective, legal in METHODS.items():
        found = solvers.get(objective, BALANCE.methods)
        assert {one.value for one in legal} - {"auto", "eplb"} <= set(found), objective
    assert set(METHODS) == {objective.value for objective in Objective}


def test_former_names_of_methods_are_read_as_auto_and_said_to_be_ignored(plan: Plan) -> None:
    goal = "  ranks: 4\n  ranks_per_node: 4\n  slots_per_rank: 3\n"
    found = plan(f"{goal}  method: cp_sat\n", limit_s=0.5)
    assert found.goal.method is Method.AUTO
    assert found.provenance.notes[0].startswith("goal.method cp_sat: ignored")
    assert {Method(name) for name in FORMER} == {Method.AUTO}
    # DESIGN.md promises these of every plan.
    assert found.certificate.space.priced == 1 + len(found.alternatives)
    assert 0 <= found.certificate.within_band <= len(found.alternatives)
    assert {"unlaunchable", "relaxations"} <= set(found.model_dump())


def test_a_method_that_the_goal_names_decides_alone(plan: Plan) -> None:
    goal = "  objective: layer_chain\n  ranks: 4\n  ranks_per_node: 2\n"
    found = plan(f"{goal}  method: moetuner\n")
    assert [one for one in found.provenance.notes if one.startswith("method ")] == [
        "method moetuner, as the goal says, whatever auto would find"
    ]
    assert {one.method for one in found.alternatives} == {"eplb", "as it runs"}


def test_methods_that_cannot_serve_are_refused_in_one_line(tmp_path: Path, plan: Plan) -> None:
    recorded(tmp_path, "wide", seed=3, experts=64, top_k=4)
    wide = "  ranks: 16\n  ranks_per_node: 8\n  workloads: [{name: wide, path: wide}]\n"
    cases = {
        "  ranks: 4\n  method: swaps\n": (
            "method 'swaps' does not serve objective balance but co_activation; take auto, eplb,"
            " local_search"
        ),
        "  ranks: 4\n  method: fastest\n": "'auto', 'eplb', 'local_search'",
        f"{wide}  objective: layer_chain\n  method: moetuner\n": (
            "goal.method: moetuner pairs 16 clusters with 16 ranks in 3 layers by 131,072"
            " variables, and 8,000 are its limit; take auto or local_search"
        ),
    }
    for goal, expected in cases.items():
        path = tmp_path / "spec.yaml"
        workloads = (
            ""
            if "workloads" in goal
            else ("  workloads: [{name: chat, path: chat}, {name: code, path: code}]\n")
        )
        path.write_text(f"schema_version: 1\ngoal:\n  kind: place\n{workloads}{goal}")
        with refused(SpecError, expected, match=f"^{re.escape(str(path))}"):
            place(path, time_limit_s=1.0)
