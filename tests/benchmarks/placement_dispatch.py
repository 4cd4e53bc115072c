"""Placements under the dispatch rules of runtimes: `python tests/benchmarks/placement_dispatch.py`.

Each case plans with `tuner.goals.place_plan.place`, as `moetune plan` does, from some recorded
passes, and evaluates on hold-out passes: the plan for an even split (`even plan`), EPLB's placement
of the same loads (`eplb`), the plan for the rule `static` (`static plan`), and the plan of a spec
that states no dispatch, for SGLang with DeepEP (`best plan`). Two more show what is reachable: the
*floor* is an even split of `even plan`, without dispatch randomness: what remains is the difference
between fit and hold-out passes. `static oracle` and `near oracle` are the same searches on the
hold-out passes themselves: what remains there cannot be removed by longer recordings. They are
heuristic; only `bound` is proven. Loads are the recordings of 256 experts
(examples/routing/long-*), synthetic ones of the same width, and, where `--routing` names a folder
of recordings in the project's own layout, OLMoE's and Mixtral's.

    load = sum over layers of the largest rank load / sum over layers of the mean, of the mean pass

`bound` is the least that whole experts in the slots allow under an even split. Rules:

    even          EPLB's assumption; the expectation of `dynamic` without an all-to-all backend
    near          the expectation of `static` and `dynamic` with an all-to-all backend
    static        the mean over tables of SGLang's rule by several seeds, their standard deviation
                  and the largest; by our own function, which the tests prove equal to SGLang's
    lp, near_lp   the linear program without and with node-local replicas first
    ... T         largest load when a pass has T tokens a rank, mean over draws: counts of experts
                  are given, the replica of each copy is drawn

Seconds of a search are CPU time of this process, so that other load on the machine does not affect
the figures.

`--case` runs the cases whose names contain a text. Exit code 1: a bar of `--bars` is missed: under
`static` at most half the excess of `even plan`, and never above `eplb`; and the expected load of
`best plan` under the rule it is emitted with (`near`, or `near_lp`), at most 1.02 of the bound.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from profilers.routing.store import read_recording
from solvers.placement.balance.bound import layer_bounds
from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.sampling import expected_loads
from solvers.placement.ranks import Floats, Placement, Ranks
from solvers.registry import BALANCE
from tests.benchmarks.bars import parse, say
from tests.expect import present
from tests.solvers.placement.balance.testing import families
from tests.solvers.placement.dispatch.static import rank_loads
from tests.solvers.placement.dispatch.testing import sampled_loads
from tuner.goals.place_plan import place
from tuner.search.place.evidence import WorkloadEvidence, split_recordings
from tuner.search.place.problem import eplb_baseline

MODELS: Final = Path(__file__).parents[2] / "examples/models"
WIDE: Final = Path(__file__).parents[2] / "examples/routing"
WIDE_DOMAINS: Final = ("long-python", "long-documents", "long-headers")
WIDE_SHAPES: Final = ((32, 9), (72, 4), (64, 5))
RECORDED: Final = (("olmoe", 8, 9, 8), ("olmoe", 16, 5, 8), ("mixtral-8x7b", 4, 3, 4))
RECORDED_DOMAINS: Final = ("arxiv", "c4", "wikipedia")
RANKS_A_NODE: Final = 8
TOKENS: Final = (32, 128, 1024)
SAMPLED: Final = ("static", "dynamic", "near_dynamic", "near_lp")
SYNTHETIC_TOKENS: Final = 1_000_000
SYNTHETIC_PASSES: Final = 4
SEED: Final = 2024
MOST_OF_BOUND: Final = 1.02
LEAST_CUT: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One placement of one case under every rule."""

    case: str
    placement: str
    bound: float
    loads: dict[str, float]
    dispatch: str = ""
    """The rule that is emitted, where the planner chose."""
    solve_s: float | None = None
    missed: tuple[str, ...] = field(default=())


EXPECTED: Final[Mapping[str, str]] = {"static": "near", "dynamic": "near", "lp": "near_lp"}
"""By the rule that is emitted, what is expected of it beside an all-to-all backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is run."""

    wide_shapes: tuple[tuple[int, int], ...] = WIDE_SHAPES
    wide_domains: tuple[str, ...] = WIDE_DOMAINS
    synthetic: tuple[int, int] = (4, 256)
    """Layers and experts."""
    tokens: tuple[int, ...] = TOKENS
    seeds: int = 8
    draws: int = 8
    time_limit_s: float = 8.0


SMALL: Final = Size(
    wide_shapes=((8, 9),),
    wide_domains=(),
    synthetic=(2, 64),
    tokens=(32,),
    seeds=4,
    draws=2,
    time_limit_s=2.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload on ranks."""

    name: str
    recording: Path
    ranks: int
    slots: int
    per_node: int
    model: str = ""
    """Of examples/models; empty: one of the recording's experts and layers is made up."""


def missed(
    result: Mapping[str, Mapping[str, float]], bound: float, *, emitted: str
) -> tuple[tuple[str, str], ...]:
    """Bars that a plan misses, each with the plan's name.

    Args:
        found: loads by rule, of every placement.
        bound: the least load that whole experts allow.
        emitted: the rule of the best plan.
    """
    most = bound + LEAST_CUT * (result["even plan"]["static"] - bound)
    bars = (
        ("static plan", "static: half of the excess", most, "static"),
        ("static plan", "static: above EPLB's rule", result["eplb"]["static"], "static"),
        ("best plan", "expected load", MOST_OF_BOUND * bound, EXPECTED[emitted]),
    )
    return tuple((name, said) for name, said, most, rule in bars if result[name][rule] > most)


def text_of(line: Line) -> str:
    """One placement as text."""
    loads = "  ".join(f"{name} {value:.4f}" for name, value in line.loads.items())
    rule = f"  emitted with {line.dispatch}" if line.dispatch else ""
    spent = "" if line.solve_s is None else f"  ({line.solve_s:.0f} s)"
    bad = "".join(f"  MISSED {said}" for said in line.missed)
    return f"{line.case}: {line.placement:<13} bound {line.bound:.4f}  {loads}{rule}{spent}{bad}"


def cases(size: Size, work: Path, routing: Path | None) -> Iterator[Case]:
    """The whole table."""
    for ranks, slots in size.wide_shapes:
        for domain in size.wide_domains:
            yield Case(
                name=f"{domain}, {ranks} x {slots}",
                recording=WIDE / domain,
                ranks=ranks,
                slots=slots,
                per_node=RANKS_A_NODE,
            )
        yield Case(
            name=f"synthetic, {ranks} x {slots}",
            recording=synthetic(size, work),
            ranks=ranks,
            slots=slots,
            per_node=RANKS_A_NODE,
        )
    for model, ranks, slots, per_node in RECORDED if routing is not None else ():
        for domain in RECORDED_DOMAINS:
            yield Case(
                name=f"{model} {domain}, {ranks} x {slots}",
                recording=present(routing) / f"{model}_{domain}.json",
                ranks=ranks,
                slots=slots,
                per_node=per_node,
                model={"olmoe": "olmoe-1b-7b", "mixtral-8x7b": "mixtral-8x7b"}[model],
            )


def synthetic(size: Size, work: Path) -> Path:
    """Passes of one synthetic family, drawn from its loads: SGLang's counts, step by step."""
    file = work / "synthetic.json"
    if not file.exists():
        layers, experts = size.synthetic
        rng = np.random.default_rng(SEED)
        (load_LE,) = families(rng, num_families=1, num_layers=layers, num_experts=experts)
        share_LE = load_LE / load_LE.sum(axis=1, keepdims=True)
        counts = [rng.multinomial(SYNTHETIC_TOKENS, share_LE) for _ in range(SYNTHETIC_PASSES)]
        file.write_text(json.dumps({"logical_count": np.array(counts).tolist()}))
    return file


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """The plan of a case, and its hold-out passes."""

    placement: Placement
    evidence: WorkloadEvidence
    ranks: Ranks
    solve_s: float
    dispatch: str


def planned(case: Case, dispatch: str | None, size: Size, work: Path) -> Planned:
    """Plan a case for a rule, or for the best of SGLang's."""
    goal: dict[str, Any] = {
        "kind": "place",
        "ranks": case.ranks,
        "ranks_per_node": case.per_node,
        "slots_per_rank": case.slots,
        "workloads": [{"name": "all", "path": str(case.recording)}],
    }
    spec: dict[str, Any] = {"schema_version": 1, "goal": goal, "emit": []}
    if dispatch is not None:
        goal["dispatch"] = dispatch
    if dispatch != "even":
        spec |= {"model": str(model_of(case, work)), "emit": ["sglang"]}
    # JSON is YAML.
    path = work / "spec.yaml"
    path.write_text(json.dumps(spec))
    made = place(path, time_limit_s=size.time_limit_s, clock=time.process_time)
    (evidence,) = split_recordings(made.spec)
    expert_LS = np.array(present(made.plan.decision).physical_to_logical, dtype=np.int64)
    return Planned(
        placement=Placement(expert_LS=expert_LS),
        evidence=evidence,
        ranks=made.spec.ranks,
        solve_s=made.plan.certificate.solve_s,
        dispatch="".join(mark.dispatch for mark in made.plan.made_for),
    )


def model_of(case: Case, work: Path) -> Path:
    """The case's model; SGLang's file has a row for each of its layers."""
    if case.model:
        return MODELS / case.model
    recording = read_recording(case.recording)
    config = json.loads((MODELS / "qwen3-30b-a3b/config.json").read_text())
    config |= {
        "num_hidden_layers": len(recording.layer_ids),
        "num_experts": recording.num_experts,
        "num_experts_per_tok": recording.top_k or config["num_experts_per_tok"],
    }
    folder = work / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def lines(case: Case, size: Size, work: Path) -> list[Line]:
    """A case's placements, evaluated."""
    plans = {
        "even plan": planned(case, "even", size, work),
        "static plan": planned(case, "static", size, work),
        "best plan": planned(case, None, size, work),
    }
    evidence, ranks = plans["even plan"].evidence, plans["even plan"].ranks
    placements = {"eplb": eplb_baseline((evidence,), ranks=ranks, groups=None).placement}
    placements |= {name: plan.placement for name, plan in plans.items()}
    placements |= oracles(evidence, ranks, size)
    mean_LE = evidence.holdout_PLE.mean(axis=0)
    problem = BalanceProblem(load_WLE=mean_LE[None], weight_W=np.ones(1), ranks=ranks)
    bound = float(layer_bounds(problem).sum() / problem.mean_WL.sum())
    result = {
        name: evaluate(placement, mean_LE, ranks, size) for name, placement in placements.items()
    }
    top_k = evidence.recording.top_k or 8
    result["best plan"] |= noisy(placements["best plan"], mean_LE, ranks, size, top_k=top_k)
    misses = missed(result, bound, emitted=plans["best plan"].dispatch)
    return [
        Line(
            case=case.name,
            placement=name,
            bound=bound,
            loads=loads,
            dispatch=plans[name].dispatch if name in plans else "",
            solve_s=plans[name].solve_s if name in plans else None,
            missed=tuple(said for of, said in misses if of == name),
        )
        for name, loads in result.items()
    ]


def oracles(evidence: WorkloadEvidence, ranks: Ranks, size: Size) -> dict[str, Placement]:
    """Place for the mean of the hold-out passes themselves, in a plan's time."""
    load_LE = evidence.holdout_PLE.mean(axis=0)
    result = {}
    for name, dispatch in (
        ("static oracle", ReplicaDispatch.STATIC),
        ("near oracle", ReplicaDispatch.NEAR),
    ):
        problem = BalanceProblem(
            load_WLE=load_LE[None].copy(), weight_W=np.ones(1), ranks=ranks, dispatch=dispatch
        )
        result[name] = present(BALANCE.solve(problem, time_limit_s=size.time_limit_s).solution)
    return result


def evaluate(placement: Placement, mean_LE: Floats, ranks: Ranks, size: Size) -> dict[str, float]:
    """The largest loads of a placement under every rule."""
    case = DispatchCase(load_PLE=mean_LE[None], placement=placement, ranks=ranks)
    seeds = [largest(rank_loads(replace(case, seed=1000 + seed))) for seed in range(size.seeds)]
    return {
        "even": largest(expected_loads("even", case)),
        "near": largest(expected_loads("near_dynamic", case)),
        "static": float(np.mean(seeds)),
        "static sd": float(np.std(seeds)),
        "static max": float(np.max(seeds)),
        "lp": largest(expected_loads("lp", case)),
        "near_lp": largest(expected_loads("near_lp", case)),
    }


def noisy(
    placement: Placement, mean_LE: Floats, ranks: Ranks, size: Size, *, top_k: int
) -> dict[str, float]:
    """The largest loads of passes of few tokens, with random replicas."""
    case = DispatchCase(load_PLE=mean_LE[None], placement=placement, ranks=ranks)
    loads: dict[str, float] = {}
    for tokens in size.tokens:
        copies = tokens * ranks.num_ranks * top_k
        small_PLE = np.rint(mean_LE[None] * (copies / mean_LE.sum(axis=1).mean()))
        small = replace(case, load_PLE=small_PLE)
        for rule in SAMPLED:
            drawn = [
                largest(sampled_loads(rule, replace(small, seed=seed)))
                for seed in range(size.draws)
            ]
            loads[f"{rule} {tokens}"] = float(np.mean(drawn))
    return loads


def largest(load_PLG: Floats) -> float:
    """The largest rank load of each layer over the mean, summed over layers first."""
    return float(load_PLG.max(axis=2).sum() / load_PLG.mean(axis=2).sum())


def main() -> int:
    """Print the figures, searches by the seconds of this process."""
    with mock.patch.object(time, "perf_counter", time.process_time):
        return print_figures()


def print_figures() -> int:
    """Print the figures."""
    chosen = parse(
        __doc__,
        {
            "--bars": False,
            "--expected": False,
            "--case": {"action": "append", "default": [], "help": "cases whose name holds this"},
            "--routing": (Path, None),
            "--seconds": Size().time_limit_s,
        },
    )
    size = Size(time_limit_s=chosen.seconds, tokens=() if chosen.expected else TOKENS)
    result: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(size, Path(folder), chosen.routing):
            if not chosen.case or any(name in case.name for name in chosen.case):
                found = lines(case, size, Path(folder))
                result += found
                say(*map(text_of, found))
    if not result:
        raise SystemExit(f"no case is called like {chosen.case}")
    return int(chosen.bars and any(line.missed for line in result))


if __name__ == "__main__":
    sys.exit(main())
