"""Today's model against layouts that ran on two emulated nodes, with the profile of those nodes.

examples/profiles/emulated-2x2: a profile of two nodes of two ranks with 1 Gbit/s and 1 ms between
them, and the times of steps there. Neither changes, so that what is tested is the model.
tests/profilers/links/test_emulated_layouts.py measures both anew.
"""

from pathlib import Path

import pytest

from profilers.store import read_profile
from tests.expect import present
from tests.profilers.steps.crossing import inter_node_bytes
from tests.tuner.search.testing import Comparison, MeasuredLayouts, compare_predictions
from tuner.api import machine_of, plan, work_of
from tuner.engines.reference.step_config import step_config
from tuner.plans.train import Plan

EXAMPLE = Path(__file__).parents[4] / "examples/profiles/emulated-2x2"


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(EXAMPLE / "spec.yaml", top=1).plan


@pytest.fixture(scope="module")
def runs() -> MeasuredLayouts:
    return MeasuredLayouts.model_validate_json((EXAMPLE / "runs.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def comparison(made: Plan, runs: MeasuredLayouts) -> Comparison:
    machine = machine_of(made.cluster.pools[0], read_profile(EXAMPLE / "profile"))
    return compare_predictions(runs, work=work_of(made), machine=machine)


def test_the_plan_keeps_exchanges_of_tokens_inside_nodes(made: Plan) -> None:
    assert present(made.decision).expert_model_parallel_size == 2
    assert present(made.predicted).inter_node_bytes == 0.0


def test_layouts_are_predicted_in_the_order_in_which_they_ran(
    runs: MeasuredLayouts, comparison: Comparison
) -> None:
    assert len(runs.layouts) >= 6
    assert {one.decision.dispatcher for one in runs.layouts} == {"alltoall", "hierarchical"}
    assert comparison.rank_correlation >= 0.9


def test_the_first_choice_is_within_5_percent_of_the_best(
    made: Plan, runs: MeasuredLayouts, comparison: Comparison
) -> None:
    assert comparison.regret_ratio <= 0.05
    assert made.decision in [one.decision for one in runs.layouts]


def test_bytes_between_nodes_were_counted_as_predicted(
    made: Plan, runs: MeasuredLayouts, comparison: Comparison
) -> None:
    for one, said in zip(runs.layouts, comparison.predicted, strict=True):
        config = step_config(made, one.decision, steps=1, warmup_steps=0)
        assert said.inter_node_bytes == inter_node_bytes(config, ranks_per_node=2)
        assert said.inter_node_bytes == pytest.approx(one.inter_node_bytes, rel=0.05)


def test_hierarchical_dispatch_saves_half_of_what_flat_dispatch_sends(
    runs: MeasuredLayouts,
) -> None:
    sent = {
        one.decision.dispatcher: one.inter_node_bytes
        for one in runs.layouts
        if one.decision.data_parallel_size == 4 and one.decision.expert_model_parallel_size == 4
    }
    # Four experts per token on two nodes: two copies cross, of which one is a duplicate.
    assert sent["hierarchical"] == pytest.approx(0.5 * sent["alltoall"], rel=0.02)
