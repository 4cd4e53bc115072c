"""examples/slow-link: the node with the bad cable is left as the spare, or hurts least."""

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from profilers.imports.link_matrix import read_link_matrix
from tests.expect import present
from tests.printed import flat
from tuner.api import Planned, plan
from tuner.cli.plan_text import explanation, plan_text
from tuner.goals.train_folder import write_plan
from tuner.search.nodes.expected_step import SLOW_LINKS

EXAMPLE = Path(__file__).parents[2] / "examples" / "slow-link"
SEARCHED = "tensor_model_parallel_size: [1, 2]"
FEW = "pipeline_model_parallel_size: [2, 4], micro_batch_size: 1, zero_stage: 1"
"""What the example searches, and the part of it that holds its best layouts."""
FEWEST = FEW.replace("[2, 4]", "4")


def _copied_spec(folder: Path, text: str, *, searched: str = FEW) -> Path:
    model = EXAMPLE.parent / "models" / "mixtral-8x7b"
    text = text.replace("../models/mixtral-8x7b", str(model)).replace(SEARCHED, searched)
    (folder / "spec.yaml").write_text(text)
    return folder / "spec.yaml"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    folder = tmp_path_factory.mktemp("slow-link")
    shutil.copy(EXAMPLE / "links.csv", folder)
    return plan(_copied_spec(folder, (EXAMPLE / "spec.yaml").read_text()), top=1)


@pytest.mark.slow
def test_the_whole_example_has_the_same_plan(planned: Planned) -> None:
    whole = plan(EXAMPLE / "spec.yaml", top=1).plan
    assert whole.decision == planned.plan.decision
    assert whole.placement == planned.plan.placement


@pytest.mark.slow
def test_the_bad_cable_is_left_as_the_spare(planned: Planned) -> None:
    (order,) = present(planned.plan.placement).node_orders
    assert order.spare == ("node-5",)
    assert sorted(order.nodes) == [f"node-{n}" for n in (1, 2, 3, 4, 6, 7, 8, 9)]
    assert order.bound_s <= order.step_time_after_s < 0.95 * order.step_time_before_s


@pytest.mark.slow
def test_the_weak_port_joins_no_ring_of_gradients(planned: Planned) -> None:
    decision, placement = planned.plan.decision, planned.plan.placement
    assert decision is not None
    ranks = decision.pipeline_model_parallel_size
    # All experts lie inside a node, so a stage's nodes sum around one ring in the order of ranks.
    assert decision.expert_model_parallel_size <= 8
    nodes = np.array(present(placement).hosts).reshape(ranks, -1)
    rings = [(*ring, ring[0]) for ring in nodes.tolist()]
    neighbours = {frozenset(pair) for ring in rings for pair in pairwise(ring)}
    assert frozenset({"node-2", "node-7"}) not in neighbours


def test_what_is_written_says_the_order(planned: Planned, tmp_path: Path) -> None:
    made = write_plan(tmp_path / "plan", planned.plan, spec=planned.spec, profiles={})
    placement = present(made.placement)
    for target in made.emit:
        lines = (tmp_path / "plan" / "launch" / target / "hosts.txt").read_text().splitlines()
        assert tuple(lines) == placement.hosts
    used = read_link_matrix(tmp_path / "plan" / "used" / "links-0.csv")
    given = read_link_matrix(EXAMPLE / "links.csv")
    assert used.nodes == given.nodes
    assert (used.bytes_per_s_NN == given.bytes_per_s_NN).all()
    assert set(made.provenance.links_sha256) == {"a100"}
    text = flat(plan_text(made, folder=Path("plan")))
    assert "spare: node-5" in text
    assert "in the listed order; no order is faster than" in text
    assert f"{len(placement.stages)} stage" in flat(explanation(made))


@pytest.mark.slow
def test_without_a_spare_the_slow_node_costs_time(tmp_path: Path) -> None:
    text = (EXAMPLE / "spec.yaml").read_text()
    text = text.replace("nodes: 9", "nodes: 8").replace(", spare_nodes: 1", "")
    spec = _copied_spec(tmp_path, text, searched=FEWEST)
    # Without node-9 all that is left must run.
    lines = [line.rpartition(",")[0] for line in (EXAMPLE / "links.csv").read_text().splitlines()]
    (tmp_path / "links.csv").write_text("\n".join(lines[:-1]) + "\n")
    made = plan(spec, top=1).plan
    (order,) = present(made.placement).node_orders
    assert order.spare == ()
    assert made.predicted is not None
    assert made.predicted.breakdown_s[SLOW_LINKS] > 0.0
    assert sum(made.predicted.breakdown_s.values()) == pytest.approx(made.predicted.step_time_s)
    assert made.predicted.step_time_s == pytest.approx(order.step_time_after_s)
    assert any(note.startswith("slow links of pool 'a100'") for note in made.provenance.notes)
