"""Every field of a training decision through the translators into columns, and the builders.

    planner/analytic/candidates   degrees and ways of a search -> columns
    estimate/pricing              a launch -> columns
    verify/budget/production      a decision -> columns
    backtest/strategy             a published row -> columns

Where two of them speak of the same launch they must say the same; a field that moves no column
stands in `UNPRICED` with the reason.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from tuner.costs.analytic.shapes import Strategies
from tuner.emit.registry import emit
from tuner.emit.testing import sample_verified, write_emitted
from tuner.estimate import decision as estimated
from tuner.estimate.configuration import Configuration, configuration_of
from tuner.estimate.estimate import bench_of
from tuner.estimate.pricing import strategies_of
from tuner.estimate.registry import read_launch
from tuner.plan import TrainDecision
from tuner.planner import decisions as of_the_reference_step
from tuner.planner.analytic import answer, ways
from tuner.spec.capabilities import intersection
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.refusals import refusals
from tuner.spec.spec import Spec
from tuner.verify.budget.production import strategies_of as strategies_of_decision

UNPRICED: Final[Mapping[str, str]] = {
    "pipeline_layout": "stages are no column: their layers go beside the columns",
    "mtp_num_layers": "a part of the shape that the columns are priced with",
    "fp8_recipe": "element sizes come with the question, which has one precision",
    "rank_order": "orders the groups of all columns, beside them",
}
"""Fields that no column of a decision holds."""
UNMENTIONED: Final[Mapping[str, frozenset[str]]] = {
    "the reference step": frozenset(
        {
            # Nothing of its kind can be launched there (tuner/spec/manifests/reference.py).
            "a2a_overlap",
            "activation_offload",
            "cuda_graph",
            "ends_as_layers",
            "fp8_recipe",
            "gradient_bytes",
            "mtp_num_layers",
            "optimizer_offload",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "rank_order",
            "recompute_num_layers",
            "schedule",
            "shard_ranks",
        }
    ),
    "estimate": frozenset(),
    "the search": frozenset({"ends_as_layers"}),
}
"""By builder: fields that it leaves at their defaults."""


def _spec(pair: Any, decision: TrainDecision) -> Spec:
    goal = sample_verified(pair.model, decision).plan.goal
    pool = Pool(
        name="pool", device="h100-sxm", nodes=-(-decision.num_devices // 8), devices_per_node=8
    )
    return Spec(
        path=Path("spec.yaml"),
        model_path=Path("config.json"),
        model=pair.model,
        cluster=Cluster(pools=(pool,)),
        goal=goal,
        emit=("megatron-lm",),
    )


def _columns(strategies: Strategies) -> dict[str, tuple[float, ...]]:
    return {
        one.name: tuple(np.asarray(getattr(strategies, one.name), dtype=float).ravel())
        for one in fields(strategies)
    }


def _of_decision(pair: Any, decision: TrainDecision) -> dict[str, tuple[float, ...]]:
    goal = sample_verified(pair.model, decision).plan.goal
    return _columns(
        strategies_of_decision(
            decision,
            sequence_length=goal.sequence_length,
            global_batch_size=goal.global_batch_size,
        )
    )


def test_a_field_moves_a_column_of_its_decision(pairs: Any, none_of: Any) -> None:
    failures, moved = [], set[str]()
    for pair in pairs:
        before, after = _of_decision(pair, pair.before), _of_decision(pair, pair.after)
        if before != after:
            moved.add(pair.field)
    every = {pair.field for pair in pairs}
    failures += [f"{field} moves no column" for field in every - moved - set(UNPRICED)]
    failures += [f"stale: {field} moves a column" for field in moved & set(UNPRICED)]
    none_of(failures)


def _launched(folder: Path, pair: Any, decision: TrainDecision) -> Configuration:
    verified = sample_verified(pair.model, decision, emit=("megatron-lm",))
    write_emitted(folder, emit("megatron-lm", verified))
    launch = read_launch(str(folder / "run.sh"))
    return configuration_of(launch, _spec(pair, decision))[0]


def test_a_launch_and_its_decision_are_the_same_columns(
    pairs: Any, none_of: Any, tmp_path: Path
) -> None:
    failures, compared = [], 0
    for number, (pair, name) in enumerate(
        (pair, name) for pair in pairs for name in ("before", "after")
    ):
        decision = getattr(pair, name)
        refused = refusals(intersection(("megatron-lm",)), model=pair.model, decision=decision)
        if refused or decision.fp8_recipe:
            continue
        own = _launched(tmp_path / str(number), pair, decision)
        spec = _spec(pair, decision)
        found = _columns(strategies_of(own, bench_of(spec, None)))
        wanted = _of_decision(pair, estimated.decision_of(own, pair.model))
        direct = _of_decision(pair, decision)
        compared += 1
        for column, value in found.items():
            at = f"{pair.field} ({name}): {column}"
            if value != wanted[column]:
                failures.append(f"{at} {value} of the launch, {wanted[column]} of its decision")
            # Megatron-FSDP overlaps whatever is asked; the layers are written out.
            is_forced = decision.zero_stage >= 2 and column.startswith("overlap_")
            if direct[column] != wanted[column] and not (is_forced or column == "ends_as_layers"):
                failures.append(f"{at} {direct[column]} emitted, {wanted[column]} read back")
    assert compared > 40
    none_of(failures)


def _dict_keys(function: Any) -> Iterator[str]:
    """Yield the texts that are keys in the source of a function."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Dict):
            yield from (
                key.value
                for key in node.keys
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            )


def test_every_builder_of_decisions_says_every_field(
    pairs: Any, none_of: Any, tmp_path: Path
) -> None:
    pair = pairs[0]
    own = _launched(tmp_path, pair, pair.before)
    degrees = of_the_reference_step.degrees_of(pair.before)
    options = of_the_reference_step.options_of(pair.before)
    reference = of_the_reference_step.decision(
        degrees, layers=pair.before.pipeline_layout, options=options
    )
    said = {
        "estimate": estimated.decision_of(own, pair.model).model_fields_set,
        "the reference step": reference.model_fields_set,
        "the search": {*_dict_keys(answer.named), *_dict_keys(ways.ways_of)},
    }
    assert set(said) == set(UNMENTIONED)
    every = set(TrainDecision.model_fields)
    none_of(
        [
            f"{builder}: {field} " + ("is left out" if field not in names else "is said: stale")
            for builder, names in said.items()
            for field in sorted((every - names) ^ UNMENTIONED[builder])
        ]
    )
