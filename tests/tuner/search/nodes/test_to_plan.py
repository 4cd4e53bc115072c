from typing import Any

import numpy as np
import pytest

from profilers.imports.link_matrix import LinkMatrix
from tests.expect import present
from tests.tuner.engines.testing import sample_decision, sample_verified
from tests.tuner.models import example_model
from tuner.faults.forecast import RunForecast
from tuner.faults.levels import Level
from tuner.faults.run_shares import CheckpointLevels
from tuner.plans.train import Plan
from tuner.search.nodes.expected_step import SLOW_LINKS, slowed
from tuner.search.nodes.to_plan import with_node_order


def plan(**changes: Any) -> Plan:
    """Two stages of four nodes each, of a pool of nine."""
    wide = {"data_parallel_size": 32, "expert_data_parallel_size": 4}
    made = sample_verified(example_model("mixtral-8x7b"), sample_decision(**wide)).plan
    pool = made.cluster.pools[0].model_copy(update={"nodes": 9, "nic": 50e9, **changes})
    return made.model_copy(update={"cluster": made.cluster.model_copy(update={"pools": (pool,)})})


def links(*, slow: int) -> LinkMatrix:
    """Nine nodes, one of which every link is a hundred times slower."""
    rates_NN = np.full((9, 9), 400e9)
    rates_NN[slow, :] = rates_NN[:, slow] = 4e9
    np.fill_diagonal(rates_NN, np.inf)
    return LinkMatrix(nodes=tuple(f"n{node}" for node in range(9)), bytes_per_s_NN=rates_NN)


def test_a_plan_of_one_pool_names_its_hosts_in_order_of_ranks() -> None:
    made = plan()
    found = with_node_order(made, {"pool": links(slow=3)}, cluster=made.cluster, time_limit_s=30)
    placement = present(found.placement)
    (order,) = placement.node_orders
    assert placement.hosts == order.nodes
    assert order.spare == ("n3",)
    assert len(placement.hosts) == 8
    assert placement.unused_devices == {"pool": 8}
    assert [stage.devices for stage in placement.stages] == [32, 32]
    # With the slow node left out the price stays as it was.
    assert found.predicted == made.predicted
    assert found.provenance.notes == ()


def test_slow_links_that_cannot_be_avoided_are_priced_and_noted() -> None:
    made = plan()
    matrix = links(slow=3)
    rates_NN = np.array(matrix.bytes_per_s_NN)
    rates_NN[5, :] = rates_NN[:, 5] = 4e9
    two = LinkMatrix(nodes=matrix.nodes, bytes_per_s_NN=rates_NN)
    found = with_node_order(made, {"pool": two}, cluster=made.cluster, time_limit_s=30)
    (order,) = present(found.placement).node_orders
    slow_s = present(found.predicted).breakdown_s[SLOW_LINKS]
    assert slow_s > 0.0
    assert present(found.predicted).step_time_s == pytest.approx(
        present(made.predicted).step_time_s + slow_s
    )
    assert order.step_time_after_s == pytest.approx(present(found.predicted).step_time_s)
    assert order.bound_s <= order.step_time_after_s <= order.step_time_before_s
    (note,) = found.provenance.notes
    assert note.startswith("slow links of pool 'pool' take ")


def test_all_of_a_prediction_follows_the_step() -> None:
    made = present(plan().predicted)
    run = RunForecast(
        finishes=True,
        effective_time_ratio=0.5,
        time_ratios={"training": 0.5, "lost": 0.5},
        goodput_tokens_per_s=100.0,
        effective_step_s=4.0,
        checkpoint_bytes=1,
        checkpoint_interval_s=60.0,
        checkpoint_interval_steps=30,
        steps=10,
        wall_clock_s=40.0,
        wall_clock_s_band=(30.0, 50.0),
        device_hours=8.0,
    )
    # Two seconds more than the two that a step of the sample takes.
    found = slowed(made.model_copy(update={"run": run, "mfu_ratio": 0.5}), 2.0)
    assert found.step_time_s == 4.0
    assert found.step_time_s_band == (made.step_time_s_band[0], 2 * made.step_time_s_band[1])
    assert found.tokens_per_s_per_device == made.tokens_per_s_per_device / 2
    fewest, most = made.tokens_per_s_per_device_band
    assert found.tokens_per_s_per_device_band == (fewest / 2, most)
    assert sum(found.breakdown_s.values()) == pytest.approx(found.step_time_s)
    assert found.mfu_ratio == 0.25
    assert present(found.run).wall_clock_s == 80.0
    assert present(found.run).wall_clock_s_band == (60.0, 100.0)
    assert present(found.run).goodput_tokens_per_s == 50.0
    assert present(found.run).checkpoint_interval_steps == 15
    assert present(found.run).cost is None
    assert slowed(made, 0.0) is made


def test_nodes_that_cannot_be_ordered_are_noted_and_kept() -> None:
    made = plan(nodes=12, devices_per_node=6)
    found = with_node_order(made, {"pool": links(slow=0)}, cluster=made.cluster, time_limit_s=9)
    assert found.placement is None
    assert found.predicted == made.predicted
    (note,) = found.provenance.notes
    assert note.endswith("stages of 32 devices do not fill nodes of 6")


def test_oversubscription_with_a_matrix_is_noted() -> None:
    made = plan(oversubscription=2.0)
    found = with_node_order(made, {"pool": links(slow=3)}, cluster=made.cluster, time_limit_s=30)
    assert any("counted twice" in note for note in found.provenance.notes)


def test_without_matrices_a_plan_stays_itself() -> None:
    made = plan()
    assert with_node_order(made, {}, cluster=made.cluster, time_limit_s=1.0) is made


def test_checkpoints_on_hosts_still_divide_those_on_shared_storage_of_longer_steps() -> None:
    made = present(plan().predicted)
    run = RunForecast(
        finishes=True,
        effective_time_ratio=0.9,
        time_ratios={"training": 0.9},
        goodput_tokens_per_s=1.0,
        checkpoint_bytes=1,
        checkpoint_interval_s=210.0 * made.step_time_s,
        checkpoint_interval_steps=210,
        checkpoint_levels=CheckpointLevels(
            levels=(Level.HOST, Level.SHARED),
            host_interval_s=30.0 * made.step_time_s,
            host_interval_steps=30,
            compared=(),
            num_priced=1,
        ),
    )
    # Steps take 1.4 times as long: 21.4 of them are as long as 30 were, and seven times 21 of both.
    longer = present(slowed(made.model_copy(update={"run": run}), 0.4 * made.step_time_s).run)
    assert present(longer.checkpoint_levels).host_interval_steps == 21
    assert longer.checkpoint_interval_steps == 147


def test_longer_steps_leave_room_for_the_writes_of_a_period() -> None:
    """Worked by hand: 100 s to shared storage and eleven copies of 48 s beside their stalls of 1 s.

    They are 628 s, of which every one of twelve segments must have 52.3 s: three steps of 25 s.
    """
    made = present(plan().predicted)
    predicted = made.model_copy(
        update={
            "step_time_s": 10.0,
            "step_time_s_band": (9.0, 11.0),
            "run": RunForecast(
                finishes=True,
                effective_time_ratio=0.9,
                time_ratios={"training": 0.9},
                goodput_tokens_per_s=1.0,
                checkpoint_bytes=1,
                checkpoint_interval_s=720.0,
                checkpoint_interval_steps=72,
                checkpoint_stall_s=1.0,
                checkpoint_write_s=101.0,
                checkpoint_in_background=True,
                checkpoint_levels=CheckpointLevels(
                    levels=(Level.HOST, Level.SHARED),
                    host_interval_s=60.0,
                    host_interval_steps=6,
                    host_stall_s=1.0,
                    host_write_s=50.0,
                    compared=(),
                    num_priced=1,
                ),
            ),
        }
    )
    run = present(slowed(predicted, 15.0).run)
    assert present(run.checkpoint_levels).host_interval_steps == 3
    assert run.checkpoint_interval_steps == 36
