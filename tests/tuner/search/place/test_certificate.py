"""What the certificate of a placement says, and of which placement."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from profilers.routing.recording import Recording
from profilers.routing.store import write_recording
from solvers.placement.ranks import Placement, Ranks
from solvers.result import Outcome, Status
from tests.expect import present
from tests.rows import each_row
from tuner.goals.place_spec import read_place_spec
from tuner.search.place.certificate import binding_constraint, to_certificate
from tuner.search.place.cost import fit_cost, traffic_scale
from tuner.search.place.plan_place import state_problem
from tuner.search.place.problem import traffic_problem
from tuner.search.settings import SearchSettings
from tuner.spec.place_spec import PlaceSpec

TOKENS, LAYERS, EXPERTS = 240, 3, 8


def stated(folder: Path, objective: str) -> PlaceSpec:
    """Tokens that stay with even or with odd experts."""
    rng = np.random.default_rng(3)
    parity_T = rng.integers(0, 2, TOKENS)
    token_LTK = np.stack(
        [
            np.stack([2 * rng.permutation(EXPERTS // 2)[:2] + parity for parity in parity_T])
            for _ in range(LAYERS)
        ]
    ).astype(np.int32)
    counts_LE = np.stack([np.bincount(layer.ravel(), minlength=EXPERTS) for layer in token_LTK])
    flow_MEE = np.zeros((LAYERS - 1, EXPERTS, EXPERTS))
    for layer in range(LAYERS - 1):
        for first in token_LTK[layer].T:
            for second in token_LTK[layer + 1].T:
                np.add.at(flow_MEE[layer], (first, second), 1.0)
    write_recording(
        folder / "chat",
        Recording(
            model="tiny",
            workload="chat",
            layer_ids=tuple(range(LAYERS)),
            top_k=2,
            count_PLE=counts_LE[None],
            transition_MEE=flow_MEE,
            token_LTK=token_LTK,
        ),
    )
    path = folder / f"{objective}.yaml"
    path.write_text(
        "schema_version: 1\ngoal:\n  kind: place\n  ranks: 2\n"
        f"  objective: {objective}\n  workloads: [{{name: chat, path: chat}}]\n"
    )
    return read_place_spec(path)


@each_row("objective", ["layer_chain", "co_activation"])
def test_traffic_is_certified_of_the_chosen_placement_not_of_what_the_solver_found(
    tmp_path: Path, objective: str
) -> None:
    problem = state_problem(stated(tmp_path, objective), settings=SearchSettings())
    scale = traffic_scale(problem, traffic_problem(problem))
    parted = [0, 2, 4, 6, 1, 3, 5, 7]
    mixed = [0, 2, 1, 3, 4, 6, 5, 7]
    good, bad = (Placement(expert_LS=np.array([row] * LAYERS)) for row in (parted, mixed))
    value = {name: fit_cost(problem, one) for name, one in (("good", good), ("bad", bad))}
    assert value["good"] < 0.9 * value["bad"]

    def certified(chosen: Placement, bound: float) -> tuple[str, float | None, float | None]:
        found = Outcome(
            status=Status.FEASIBLE,
            solution=bad,
            objective=value["bad"] * scale,
            bound=bound * scale,
            solve_s=0.0,
            method="local_search",
        )
        made = to_certificate(problem, chosen, found, method="as it runs")
        assert made.objective is not None
        assert made.gap_ratio == pytest.approx(
            (made.objective - present(made.bound)) / max(made.objective, 1e-12)
        )
        return made.status, made.objective, present(made.bound)

    low = 0.5 * value["good"]
    assert certified(good, low) == (
        "optimal" if low == value["good"] else "feasible",
        value["good"],
        low,
    )
    assert certified(bad, low) == ("feasible", value["bad"], low)
    # A bound that the chosen placement reaches proves it, whatever the solver ended with.
    assert certified(good, value["good"])[0] == "optimal"
    assert certified(bad, float("-inf")) == ("feasible", value["bad"], 0.0)


def test_a_linear_program_that_evens_out_all_ranks_is_bound_by_the_mean_alone(
    tmp_path: Path,
) -> None:
    spec = stated(tmp_path, "balance")
    spec = replace(spec, ranks=Ranks.uniform(ranks=2, slots_per_rank=5))
    problem = replace(state_problem(spec, settings=SearchSettings()), dispatch="lp")
    words = {}
    for name, row in (
        ("shared", [0, 2, 4, 6, 1, 1, 3, 5, 7, 0]),
        ("alone", [0, 2, 4, 6, 0, 1, 3, 5, 7, 1]),
    ):
        words[name] = binding_constraint(problem, Placement(expert_LS=np.array([row] * LAYERS)))
    assert words["shared"] == "the mean load: no rank can have less than its share"
    assert words["alone"].startswith("whole experts in few slots")
