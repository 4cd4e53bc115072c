"""Expert placement around a slow link; run as `python tests/benchmarks/placement_links.py`.

A cluster of H100 nodes has one link that is ten times slower than the others (`link_matrix`). Every
case is planned twice by `moetune plan`'s own function, on even links and on these, and compared
with EPLB on hold-out tokens:

    examples/routing             planned on the first half of the sampled tokens, which are in order
                                 of passes, evaluated on the second half
    ../shared/data/routing       only sums over a recording exist: planned on one domain, evaluated
                                 on the transitions of another one; skipped where absent

"Predicted" is the plan's figure on the tokens it was made from, "judged" is the figure on the
hold-out; those of layer_chain are recomputed here from the placements and the three costs that the
plan prints. A case passes where the hold-out traffic is below EPLB's and the plan predicted so. At
least nine of ten cases of each objective must.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from profilers.routing.recording import Floats, Recording
from profilers.routing.store import read_recording
from tests.benchmarks.bars import parse, say
from tests.expect import present
from tuner.config.place import PlaceDecision
from tuner.goals.place_plan import place
from tuner.plans.place import LinkFacts, PlacePlan
from tuner.spec.place import Objective, TrafficObjective

ROOT: Final = Path(__file__).parents[2]
MODELS: Final = ROOT / "examples" / "models"
SHARED: Final = ROOT.parent / "shared" / "data" / "routing"
NODES: Final = 4
USUAL_BYTES_PER_S: Final = 4e11
SLOW_RATIO: Final = 10.0
PASS_TOKENS: Final = 16_384
LEAST_PASSED_RATIO: Final = 0.9
OBJECTIVES: Final = tuple(
    (objective, traffic)
    for objective in ("layer_chain", "co_activation")
    for traffic in ("total", "busiest")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recording, its hold-out, the model whose rows are priced, a slow link."""

    recording: Path
    holdout: Path | None
    """None: its own later tokens."""
    model: str
    ranks_per_node: int
    slow: tuple[int, int]
    """Nodes."""

    @property
    def name(self) -> str:
        """As it is printed."""
        elsewhere = "" if self.holdout is None else f" on {self.holdout.stem}"
        return f"{self.recording.stem}{elsewhere}, nodes {self.slow[0]} and {self.slow[1]}"


LINKS: Final = ((0, 1), (1, 3), (2, 3), (0, 2))


def cases(objective: str, shared: Path = SHARED) -> list[Case]:
    """Ten cases: of a chain four are published recordings without tokens, where available."""
    result = [
        Case(
            recording=ROOT / "examples" / "routing" / domain,
            holdout=None,
            model="small-moe",
            ranks_per_node=2,
            slow=slow,
        )
        for slow in LINKS
        for domain in ("python", "documents", "headers")
    ]
    if objective == "co_activation":
        return result[:10]
    result = result[:6]
    for model, prefix, per_node in (
        ("olmoe-1b-7b", "olmoe", 2),
        ("mixtral-8x7b", "mixtral-8x7b", 1),
    ):
        for domain, other, slow in (("c4", "wikipedia", (0, 1)), ("wikipedia", "c4", (2, 3))):
            path = shared / f"{prefix}_{domain}.json"
            if path.is_file():
                result.append(
                    Case(
                        recording=path,
                        holdout=shared / f"{prefix}_{other}.json",
                        model=model,
                        ranks_per_node=per_node,
                        slow=slow,
                    )
                )
    return result


def planned(
    case: Case, work: Path, *, objective: str, traffic: str, is_slow: bool, time_limit_s: float
) -> PlacePlan:
    """Plan one case."""
    names = [f"n{number}" for number in range(NODES)]
    lines = [",".join(("bytes_per_s", *names))]
    for one, name in enumerate(names):
        cells = []
        for two in range(NODES):
            ratio = SLOW_RATIO if is_slow and {one, two} == set(case.slow) else 1.0
            cells.append("" if one == two else repr(USUAL_BYTES_PER_S / ratio))
        lines.append(",".join((name, *cells)))
    (work / "links.csv").write_text("\n".join(lines) + "\n")
    spec = {
        "schema_version": 1,
        "model": str(model_of(case, work)),
        "cluster": {
            "pools": [
                {
                    "name": "h100",
                    "device": "h100-sxm",
                    "nodes": NODES,
                    "devices_per_node": 8,
                    "link_matrix": "links.csv",
                }
            ]
        },
        "goal": {
            "kind": "place",
            "objective": objective,
            "traffic": traffic,
            "ranks": NODES * case.ranks_per_node,
            "ranks_per_node": case.ranks_per_node,
            "tokens_per_pass": PASS_TOKENS,
            "workloads": [{"name": "w", "path": str(case.recording)}],
        },
        "emit": [],
    }
    path = work / "spec.yaml"
    path.write_text(json.dumps(spec))
    return place(path, time_limit_s=time_limit_s).plan


def model_of(case: Case, work: Path) -> Path:
    """Return the model whose rows are priced; for the examples Qwen3-30B's rows of their shape."""
    if case.model != "small-moe":
        return MODELS / case.model
    config = json.loads((MODELS / "qwen3-30b-a3b" / "config.json").read_text())
    config |= {"num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4}
    (work / "config.json").write_text(json.dumps(config))
    return work / "config.json"


def compared(case: Case, *, objective: str, traffic: str, time_limit_s: float) -> dict[str, Any]:
    """Compare the plans of a case with EPLB's rule."""
    with tempfile.TemporaryDirectory() as name:
        even, slow = (
            planned(
                case,
                Path(name),
                objective=objective,
                traffic=traffic,
                is_slow=is_slow,
                time_limit_s=time_limit_s,
            )
            for is_slow in (False, True)
        )
    rule_s, plan_s = holdout(case, slow)
    predicted_rule, predicted_plan = (
        _alternative(slow, "eplb").objective,
        float(slow.certificate.objective or 0.0),
    )
    predicted_ratio = 1.0 - predicted_plan / predicted_rule
    judged_ratio = 1.0 - plan_s / rule_s
    return {
        "case": case.name,
        "objective": f"{objective}, {traffic}",
        "rule_even_s": holdout(case, even)[0],
        "even_plan_s": _even_plan_s(case, even, slow),
        "rule_s": rule_s,
        "plan_s": plan_s,
        "predicted_ratio": predicted_ratio,
        "judged_ratio": judged_ratio,
        "moved": even.decision != slow.decision,
        "passes": predicted_ratio > 0.0 and judged_ratio > 0.0,
    }


def holdout(case: Case, plan: PlacePlan) -> tuple[float, float]:
    """Seconds of a pass by EPLB's rule and by the plan, on tokens that it was not made from."""
    (own,) = present(plan.predicted).traffic_times
    if plan.goal.objective is not Objective.LAYER_CHAIN:
        return own.rule_s, own.after_s
    rule_s, plan_s = (
        by_hand_s(case, plan, decision)
        for decision in (_alternative(plan, "eplb").decision, present(plan.decision))
    )
    if case.holdout is None:
        np.testing.assert_allclose((rule_s, plan_s), (own.rule_s, own.after_s), rtol=1e-9)
    return rule_s, plan_s


def by_hand_s(case: Case, plan: PlacePlan, decision: PlaceDecision) -> float:
    """Seconds of a pass under a placement on a plan's links, for objective layer_chain."""
    ranks, links = plan.goal.ranks, present(present(plan.predicted).links)
    cost_GG = costs_of(links, ranks=ranks, per_node=decision.ranks_per_node)
    copies = PASS_TOKENS * (read_recording(case.recording).top_k or 1)
    if plan.goal.traffic is TrafficObjective.MOST_LOADED:
        return copies * sum(
            float(leg_GG.max()) for leg_GG in leg_costs(decision, flow_of(case), cost_GG)
        )
    return (
        copies
        / ranks
        * sum(float(leg_GG.sum()) for leg_GG in leg_costs(decision, flow_of(case), cost_GG))
    )


def leg_costs(decision: PlaceDecision, flow: Floats, cost_GG: Floats) -> Iterator[Floats]:
    """Return flow times cost from rank to rank, for each pair of layers."""
    rank_S = np.repeat(np.arange(decision.ranks), decision.slots_per_rank)
    rank_LE = rank_S[np.argsort(np.array(decision.physical_to_logical), axis=1)]
    for flow_EE, here_E, there_E in zip(flow, rank_LE[:-1], rank_LE[1:], strict=True):
        between_GG = np.zeros_like(cost_GG)
        np.add.at(between_GG, (here_E[:, None], there_E[None, :]), flow_EE)
        yield cost_GG * between_GG


def flow_of(case: Case) -> Floats:
    """Return shares of the hold-out transitions, [pairs of layers][E][E]."""
    recording = read_recording(case.holdout or case.recording)
    flow = recording.transition_MEE if case.holdout is not None else later_pairs(recording)
    return np.asarray(present(flow) / present(flow).sum(axis=(1, 2), keepdims=True))


def later_pairs(recording: Recording) -> Floats:
    """Count the pairs of choices of the second half of the sampled tokens."""
    token_LTK = present(recording.token_LTK)
    token_LTK = token_LTK[:, token_LTK.shape[1] // 2 :]
    flow = np.zeros((len(token_LTK) - 1, recording.num_experts, recording.num_experts))
    for layer, flow_EE in enumerate(flow):
        for here in range(token_LTK.shape[2]):
            for there in range(token_LTK.shape[2]):
                np.add.at(flow_EE, (token_LTK[layer, :, here], token_LTK[layer + 1, :, there]), 1.0)
    return flow


def costs_of(links: LinkFacts, *, ranks: int, per_node: int) -> Floats:
    """Return the cost of every route from the three that the plan prints."""
    node_G = np.arange(ranks) // per_node
    cost_GG = np.where(
        node_G[:, None] == node_G, links.inside_cost or 0.0, links.between_cost or 0.0
    )
    slow = sorted(int(node_G[rank]) for rank in links.slowest_ranks)
    for one, two in (slow, slow[::-1]):
        cost_GG[np.ix_(node_G == one, node_G == two)] = links.slowest_cost
    np.fill_diagonal(cost_GG, 0.0)
    return cost_GG


def _even_plan_s(case: Case, even: PlacePlan, slow: PlacePlan) -> float | None:
    """Cost of the placement for even links on these; recomputed here for layer_chain only."""
    if slow.goal.objective is not Objective.LAYER_CHAIN or even.decision is None:
        return None
    return by_hand_s(case, slow, even.decision)


def _alternative(plan: PlacePlan, method: str) -> Any:
    return next(one for one in plan.alternatives if one.method == method)


def report_text(rows: Sequence[dict[str, Any]]) -> str:
    """Write the table, misses marked."""
    lines = []
    for objective in dict.fromkeys(row["objective"] for row in rows):
        of_it = [row for row in rows if row["objective"] == objective]
        passed = sum(row["passes"] for row in of_it)
        miss = "" if passed >= LEAST_PASSED_RATIO * len(of_it) else "  MISSED"
        lines += [f"{objective}: {passed} of {len(of_it)} beat EPLB's rule as predicted{miss}"]
        lines += [
            f"  {row['case']:<56} rule {1e3 * row['rule_even_s']:7.2f} ms on even links,"
            f" {1e3 * row['rule_s']:6.2f} on these; plan {1e3 * row['plan_s']:6.2f}"
            f"{_even(row['even_plan_s'])}; saves {row['predicted_ratio']:6.1%} predicted,"
            f" {row['judged_ratio']:6.1%} judged{'' if row['moved'] else ', not moved'}"
            for row in of_it
        ]
    return "\n".join(lines)


def _even(even_plan_s: float | None) -> str:
    return "" if even_plan_s is None else f" (made for even links {1e3 * even_plan_s:6.2f})"


def main() -> int:
    """Run all cases."""
    given = parse(__doc__, {"--time-limit": 6.0, "--shared": SHARED})
    text = report_text(
        [
            compared(case, objective=objective, traffic=traffic, time_limit_s=given.time_limit)
            for objective, traffic in OBJECTIVES
            for case in cases(objective, given.shared)
        ]
    )
    say(text)
    return int("MISSED" in text)


if __name__ == "__main__":
    sys.exit(main())
