from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profilers.imports.link_matrix import LinkMatrix
from tests.expect import present
from tests.printed import flat
from tests.tuner.engines.testing import sample_decision, sample_verified
from tests.tuner.models import example_model
from tuner.cli.plan_text import plan_text
from tuner.plans.train import Alternative, Plan, Preference, Roomier, TrainPrediction
from tuner.search.nodes.expected_step import SLOW_LINKS, expected_steps_s, replacement_index
from tuner.search.nodes.to_plan import with_node_order
from tuner.search.train.gradient_buckets import bucket_note
from tuner.search.train.memory_risk import (
    CHECKPOINT_INTERVAL_S,
    CRASHES,
    FAILED_START_S,
    LIKELY,
    RESTART_S,
    LossPrices,
    loss_prices,
)
from tuner.search.train.preference import TOLERANCE_RATIO

NODES = 4

WIDE: dict[str, Any] = {"data_parallel_size": 16, "expert_data_parallel_size": 2}
"""Two stages of two nodes, whose gradients cross between them."""
DEEP: dict[str, Any] = {
    "pipeline_model_parallel_size": 4,
    "pipeline_layout": (8,) * 4,
    "stage_recompute": ("selective",) * 4,
    "chunks": (4,) * 4,
}
"""Four stages of one node, between which only activations travel."""


ROOM = Roomier(
    decision=sample_decision(**WIDE, zero_stage=3),
    step_time_s=2.4,
    slower_ratio=0.2,
    slower_s=10.0,
    peak_memory_bytes=1,
    out_of_memory_probability=0.01,
)


def links(*, slow: float) -> LinkMatrix:
    """Of the first node every link is slow."""
    rates_NN = np.full((NODES, NODES), 400e9)
    rates_NN[0, :] = rates_NN[:, 0] = slow
    np.fill_diagonal(rates_NN, np.inf)
    return LinkMatrix(nodes=tuple("abcd"), bytes_per_s_NN=rates_NN)


def of(plan: Plan, changes: dict[str, Any], *, step_s: float) -> Alternative:
    """A runner-up that takes so long."""
    decision = sample_decision(**changes)
    predicted = sample_verified(plan.model, decision).predicted
    adjusted = predicted.model_dump() | {"step_time_s": step_s, "breakdown_s": {"compute": step_s}}
    return Alternative(
        decision=decision,
        predicted=TrainPrediction.model_validate(adjusted),
        within_band=True,
        lost_by="compute",
    )


def on_links(plan: Plan, one: Alternative, band: tuple[float, float]) -> tuple[float, ...]:
    """A band of measured over predicted, around a runner-up's ratio."""
    ratio = one.predicted.step_time_s / present(plan.predicted).step_time_s
    return tuple(edge * ratio for edge in band)


@pytest.fixture
def plan() -> Plan:
    """Two seconds wide, runners-up of 2.1 s deep and of 9 s."""
    made = sample_verified(example_model("mixtral-8x7b"), sample_decision(**WIDE)).plan
    pool = made.cluster.pools[0].model_copy(update={"nodes": NODES, "nic": 50e9})
    others = (of(made, DEEP | {"micro_batch_size": 2}, step_s=9.0), of(made, DEEP, step_s=2.1))
    cluster = made.cluster.model_copy(update={"pools": (pool,)})
    return made.model_copy(update={"cluster": cluster, "alternatives": others})


def on(plan: Plan, matrix: LinkMatrix) -> Plan:
    return with_node_order(plan, {"pool": matrix}, cluster=plan.cluster, time_limit_s=30.0)


def test_a_runner_up_that_slow_links_hurt_less_takes_the_place(plan: Plan) -> None:
    chosen = on(plan, links(slow=4e9))
    assert chosen.decision == plan.alternatives[1].decision
    assert present(chosen.predicted).step_time_s == pytest.approx(
        2.1 + present(chosen.predicted).breakdown_s.get(SLOW_LINKS, 0.0)
    )
    assert len(present(chosen.placement).stages) == 4
    assert present(chosen.preferred).fastest == plan.decision
    assert present(chosen.preferred).slower_ratio == pytest.approx(0.05)
    assert "lost to slow links, not" in flat(plan_text(chosen, folder=Path("plan")))
    # The bound of the sample is 2 s.
    assert chosen.certificate.decision_gap_ratio == pytest.approx(1.0 - 2.0 / 2.1)
    (first,) = chosen.alternatives
    assert first.decision == plan.decision
    assert first.predicted.step_time_s > present(chosen.predicted).step_time_s
    assert first.lost_by.startswith("slow links: ")
    # The other runner-up runs the layout that is chosen now with larger micro-batches.
    (variant,) = chosen.variants
    assert variant.decision == plan.alternatives[0].decision


def test_notes_on_the_replaced_decision_are_dropped(plan: Plan) -> None:
    gone = (
        bucket_note(80_000_000, objective_s=2.0, saved=0.1),
        "overlapped all-to-all wants a large CUDA_DEVICE_MAX_CONNECTIONS",
    )
    room = Roomier(
        decision=present(plan.decision),
        step_time_s=2.2,
        slower_ratio=0.1,
        slower_s=10.0,
        peak_memory_bytes=1,
        out_of_memory_probability=0.0,
    )
    notes = (*gone, "planned on the datasheet")
    adjusted = plan.model_copy(
        update={
            "roomier": room,
            "binding_constraint": "pipeline bubble: 1 s of the step",
            "provenance": plan.provenance.model_copy(update={"notes": notes}),
        }
    )
    kept = on(adjusted, links(slow=400e9))
    assert kept.roomier == room
    assert set(notes) <= set(kept.provenance.notes)
    chosen = on(adjusted, links(slow=4e9))
    assert chosen.decision == plan.alternatives[1].decision
    assert chosen.roomier is None
    assert not set(gone) & set(chosen.provenance.notes)
    assert notes[-1] in chosen.provenance.notes
    assert chosen.binding_constraint.startswith("compute: 2.10 s (100.0 %) of the step")


def test_a_runner_up_is_compared_with_the_new_decision_by_the_kernels_of_both(plan: Plan) -> None:
    """It shares no kernels with the replaced decision, and all of them with the new one."""
    same, other = (0.99, 1.01), (0.8, 1.2)
    narrow = of(plan, DEEP | {"overlap_param_gather": True}, step_s=2.2)
    rows = (
        (of(plan, WIDE | {"overlap_param_gather": True}, step_s=2.5), same),
        (of(plan, DEEP | {"zero_stage": 0}, step_s=2.1), other),
        (of(plan, DEEP | {"zero_stage": 0, "overlap_grad_reduce": True}, step_s=2.2), other),
        (narrow, same),
    )
    banded = tuple(
        row.model_copy(
            update={
                "ratio_band": tuple(edge * row.predicted.step_time_s / 2.0 for edge in band),
            }
        )
        for row, band in rows
    )
    chosen = on(plan.model_copy(update={"alternatives": banded}), links(slow=4e9))
    assert chosen.decision == rows[1][0].decision
    shown = {
        one.decision.overlap_grad_reduce: one
        for one in chosen.variants
        if one.decision.zero_stage == 0
    }
    assert shown[True].ratio_band == pytest.approx(on_links(chosen, shown[True], same))
    assert not shown[True].within_band
    (slower,) = (one for one in chosen.variants if one.decision == narrow.decision)
    assert slower.ratio_band == pytest.approx(on_links(chosen, slower, other))
    assert slower.within_band


def test_the_fastest_needs_no_reason_when_it_comes_back(plan: Plan) -> None:
    easier = Preference(
        fastest=plan.alternatives[1].decision,
        fastest_step_s=2.1,
        slower_ratio=0.0,
        reasons=("fewer pipeline stages",),
    )
    chosen = on(plan.model_copy(update={"preferred": easier}), links(slow=4e9))
    assert chosen.decision == easier.fastest
    assert chosen.preferred is None
    assert chosen.certificate.decision_gap_ratio is None
    (note,) = (one for one in chosen.provenance.notes if one.startswith("measured links: "))
    assert "lost to slow links, not" in note


def test_the_place_is_taken_at_more_risk_only_with_a_word(plan: Plan) -> None:
    risky = plan.alternatives[1]
    chance = {"out_of_memory_probability": 0.2}
    risky = risky.model_copy(update={"predicted": risky.predicted.model_copy(update=chance)})
    for before, is_said in ((0.01, True), (0.3, False)):
        own = present(plan.predicted).model_copy(update={"out_of_memory_probability": before})
        requested = plan.model_copy(update={"predicted": own, "alternatives": (risky,)})
        chosen = on(requested, links(slow=4e9))
        said = "though it has a 20.0 % chance of running out of memory, not 1.0 %"
        assert (present(chosen.preferred).reasons[1:] == (said,)) == is_said, present(
            chosen.preferred
        ).reasons


def risky(one: Alternative, chance: float, *, step_s: float | None = None) -> Alternative:
    return one.model_copy(update={"predicted": with_chance(one.predicted, chance, step_s=step_s)})


def with_chance(
    predicted: TrainPrediction, chance: float, *, step_s: float | None = None
) -> TrainPrediction:
    return predicted.model_copy(
        update={
            "out_of_memory_probability": chance,
            "out_of_memory_at_start_probability": chance / 2.0,
            "step_time_s": predicted.step_time_s if step_s is None else step_s,
        }
    )


def at_risk(plan: Plan, chance: float, *others: tuple[float, float]) -> Plan:
    """A plan of 2 s whose runners-up, deep ones, have chances of running out and steps."""
    deep = plan.alternatives[1]
    adjusted = [risky(deep, other, step_s=step_s) for other, step_s in others]
    knobs: tuple[dict[str, Any], ...] = ({}, {"zero_stage": 0}, {"overlap_grad_reduce": True})
    return plan.model_copy(
        update={
            "predicted": with_chance(present(plan.predicted), chance),
            "alternatives": tuple(
                one.model_copy(update={"decision": one.decision.model_copy(update=knob)})
                for one, knob in zip(adjusted, knobs, strict=False)
            ),
        }
    )


def total_s(plan: Plan, one: TrainPrediction, others: Sequence[TrainPrediction]) -> float:
    """The objective by hand: one of two decisions, the other of which hardly runs out."""
    chance = one.out_of_memory_probability or 0.0
    at_start = one.out_of_memory_at_start_probability or 0.0
    next_s = max([one.step_time_s, *(o.step_time_s for o in others)])
    usual_s = min([one.step_time_s, *(o.step_time_s for o in others)])
    late_s = CRASHES * (RESTART_S + CHECKPOINT_INTERVAL_S / 2.0) + FAILED_START_S
    loss_s = at_start * FAILED_START_S + (chance - at_start) * late_s
    run_s = loss_prices(plan.goal).run_s(usual_s)
    return (1.0 - chance) * one.step_time_s + chance * next_s + loss_s * usual_s / run_s


def test_equal_links_never_change_a_choice(plan: Plan) -> None:
    """The riskier runners-up are faster, up to what the choice gave up for room."""
    at_risks = [
        at_risk(plan, chance, (other, step_s))
        for chance, other, step_s in ((0.151, 0.355, 1.95), (0.02, 0.6, 1.5), (0.6, 0.7, 1.9))
    ]
    for requested in (plan, *at_risks):
        chosen = on(requested, links(slow=400e9))
        assert chosen.decision == requested.decision, requested.predicted
        assert chosen.runners_up == requested.runners_up
        assert chosen.preferred == requested.preferred
    # Hardly unequal ones neither.
    assert on(requested, links(slow=399e9)).decision == requested.decision


def test_equal_links_of_any_size_leave_a_fallback_that_is_not_listed_slower(plan: Plan) -> None:
    """100 s at 6 % were chosen before 96 s at 48 %; 110 s at 3 % are what a run goes on with."""
    room = Roomier(
        decision=sample_decision(**WIDE, zero_stage=3),
        step_time_s=110.0,
        slower_ratio=0.1,
        slower_s=10.0,
        peak_memory_bytes=1,
        out_of_memory_probability=0.03,
    )
    listed = [
        with_chance(present(plan.predicted), chance, step_s=step_s)
        for chance, step_s in ((0.06, 100.0), (0.48, 96.0), (0.2, 109.0))
    ]
    for prices in (LossPrices(), LossPrices(run_steps=1e4), LossPrices(failed_start_s=0.0)):
        usual_s = expected_steps_s(listed, prices=prices, roomier=room)
        for slow_s in (0.0, 1e-3, 1.0, 5.0, 9.0, 12.0, 15.0, 30.0, 300.0, 1e5):
            on_links_s = expected_steps_s(
                listed, prices=prices, slow_s_C=np.full(3, slow_s), roomier=room
            )
            taken = replacement_index(listed, usual_s_C=usual_s, on_links_s_C=on_links_s)
            assert taken is None, (prices, slow_s)
            # What running out costs never gets less.
            assert (on_links_s - slow_s >= usual_s - 1e-9 * slow_s).all(), (prices, slow_s)


def test_the_trade_on_equally_slow_links_still_holds_what_running_out_costs(plan: Plan) -> None:
    requested = at_risk(plan, 0.3, (0.2, 2.1)).model_copy(update={"roomier": ROOM})
    chosen = on(requested, links(slow=4e9))
    (left,) = (one for one in chosen.runners_up if one.decision == requested.decision)
    for said_s, of in (
        (present(chosen.preferred).expected_step_s, chosen.predicted),
        (present(chosen.preferred).fastest_expected_step_s, left.predicted),
    ):
        step_s = present(of).step_time_s
        assert present(said_s) > step_s or step_s >= ROOM.step_time_s
    slow_s = [
        one.breakdown_s.get(SLOW_LINKS, 0.0) for one in (present(chosen.predicted), left.predicted)
    ]
    usual = [
        one.model_copy(update={"step_time_s": one.step_time_s - slow})
        for one, slow in zip((present(chosen.predicted), left.predicted), slow_s, strict=True)
    ]
    by_hand = expected_steps_s(
        usual, prices=loss_prices(plan.goal), slow_s_C=np.array(slow_s), roomier=ROOM
    )
    assert present(chosen.preferred).expected_step_s == pytest.approx(by_hand[0])
    assert present(chosen.preferred).fastest_expected_step_s == pytest.approx(by_hand[1])


@pytest.mark.slow
def test_links_bring_no_decision_that_is_worse_by_the_expected_step(plan: Plan) -> None:
    moved = []
    for rate, chance, other, step_s in (
        (4e9, 0.01, 0.3, 2.02),
        (4e9, 0.01, 0.45, 2.2),
        (4e9, 0.01, 0.6, 1.9),
        (4e9, 0.04, 0.02, 2.3),
        (100e9, 0.01, 0.3, 2.02),
    ):
        requested = at_risk(plan, chance, (other, step_s))
        chosen = on(requested, links(slow=rate))
        (left,) = chosen.runners_up
        own_s = total_s(plan, present(chosen.predicted), [left.predicted])
        left_s = total_s(plan, left.predicted, [present(chosen.predicted)])
        if chosen.decision == requested.decision:
            continue
        moved.append((rate, other))
        assert own_s < left_s / (1.0 + TOLERANCE_RATIO), (rate, chance, other)
        assert (present(chosen.predicted).out_of_memory_probability or 0.0) <= LIKELY
    assert {rate for rate, _ in moved} >= {4e9}
    assert len(moved) < 5


def test_the_replaced_decision_stays_what_a_run_goes_on_with(plan: Plan) -> None:
    requested = at_risk(plan, 0.01, (0.2, 2.1), (0.3, 2.12))
    chosen = on(requested, links(slow=4e9))
    assert chosen.decision == requested.alternatives[0].decision
    assert present(chosen.roomier).decision == requested.decision
    (left,) = (one for one in chosen.runners_up if one.decision == requested.decision)
    assert present(chosen.roomier).step_time_s == left.predicted.step_time_s
    assert present(chosen.roomier).slower_ratio == pytest.approx(
        left.predicted.step_time_s / present(chosen.predicted).step_time_s - 1.0
    )
    assert present(chosen.preferred).expected_step_s == pytest.approx(
        total_s(plan, present(chosen.predicted), [left.predicted]), rel=0.01
    )
    assert present(chosen.preferred).fastest_expected_step_s == pytest.approx(
        left.predicted.step_time_s, rel=0.01
    )
    assert present(chosen.preferred).fastest_out_of_memory_probability == 0.01


def test_the_decision_with_headroom_is_kept_for_the_new_decision(plan: Plan) -> None:
    requested = at_risk(plan, 0.3, (0.2, 2.1)).model_copy(update={"roomier": ROOM})
    chosen = on(requested, links(slow=4e9))
    assert chosen.decision == requested.alternatives[0].decision
    assert present(chosen.roomier).decision == ROOM.decision
    # Neither of the two has its slow links: 2.4 of 2.1 s.
    assert present(chosen.roomier).slower_ratio == pytest.approx(2.4 / 2.1 - 1.0)
    # One without a chance needs none.
    assert on(at_risk(plan, 0.3, (0.0, 2.1)), links(slow=4e9)).roomier is None


def test_that_nothing_has_headroom_holds_for_any_decision(plan: Plan) -> None:
    requested = at_risk(plan, 0.6, (0.55, 2.1)).model_copy(update={"no_roomier": True})
    chosen = on(requested, links(slow=4e9))
    assert chosen.decision == requested.alternatives[0].decision
    assert chosen.roomier is None
    assert chosen.no_roomier
    assert present(chosen.preferred).expected_step_s is None


def test_every_runner_up_is_priced_on_the_links_of_the_decision(plan: Plan) -> None:
    own = plan.alternatives[0].model_copy(update={"ratio_band": (4.0, 5.0)})
    requested = plan.model_copy(update={"alternatives": (own, plan.alternatives[1])})
    chosen = on(requested, links(slow=4e9))
    assert present(chosen.predicted).breakdown_s[SLOW_LINKS] > 0.0
    before_s = {one.decision: one.predicted.step_time_s for one in requested.runners_up}
    for one in chosen.runners_up:
        slow_s = one.predicted.breakdown_s[SLOW_LINKS]
        assert one.predicted.step_time_s == pytest.approx(before_s.get(one.decision, 2.0) + slow_s)
        assert one.predicted.step_time_s > present(chosen.predicted).step_time_s
    (slower,) = (one for one in chosen.runners_up if one.decision == own.decision)
    ratio = slower.predicted.step_time_s / present(chosen.predicted).step_time_s
    # 4 to 5 times as long as the replaced one's 2 s: 0.89 to 1.11 times the 9 s predicted.
    assert present(slower.ratio_band) == pytest.approx((ratio * 8.0 / 9.0, ratio * 10.0 / 9.0))


def test_a_runner_up_on_more_nodes_than_measured_is_priced_on_usual_links(
    plan: Plan,
) -> None:
    huge = of(plan, WIDE | {"data_parallel_size": 64, "expert_data_parallel_size": 8}, step_s=2.5)
    (one,) = on(plan.model_copy(update={"alternatives": (huge,)}), links(slow=4e9)).runners_up
    assert SLOW_LINKS not in one.predicted.breakdown_s
    assert one.lost_by.endswith("priced on usual links")
