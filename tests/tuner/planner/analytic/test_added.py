"""Searches that leave out what was searched before, beside searches of everything."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from profilers.steps.config import Recompute
from tuner.planner.analytic.added import Kinds, Known, only_adds
from tuner.planner.analytic.degrees import legal_degrees
from tuner.planner.analytic.options import ways_of
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.relaxations import with_features
from tuner.planner.analytic.search import Settings, search
from tuner.spec.manifests.manifest import Capabilities
from tuner.spec.search import Search

MakeQuestion = Callable[..., Question]
SETTINGS = Settings(clock=time.perf_counter, time_limit_s=60.0, top=1)

LITTLE = Capabilities(
    names=("little",),
    zero_stages=frozenset({0, 1}),
    zero_stages_with_pipeline=frozenset({0}),
    shard_ranks_zero_stages=frozenset(),
    overlap_grad_reduce=False,
    overlap_param_gather=False,
    recompute=frozenset({Recompute.NONE, Recompute.FULL}),
    recompute_num_layers=False,
    activation_offload=False,
    optimizer_offload_zero_stages=frozenset(),
    largest_chunks=1,
    schedules=frozenset({"1f1b"}),
    virtual_pipeline=False,
    context_parallel=False,
    expert_tensor_parallel=False,
    expert_folding=False,
    dispatchers=frozenset({"alltoall"}),
    a2a_overlap=False,
    cuda_graphs=frozenset({"none"}),
)
"""A target that lacks nearly every feature."""

FEW = Search(micro_batch_size=(1, 2), optimizer_offload=(False,))


def test_what_a_feature_adds_has_its_fastest_decision(ask: MakeQuestion) -> None:
    asked = {
        "roomy": ask(devices=16, capabilities=LITTLE, limits=FEW),
        "full": ask(devices=16, capabilities=LITTLE, limits=FEW, memory_limit_bytes=14e9),
    }
    wrong, gains = [], set[str]()
    for name, question in asked.items():
        base = search(question, SETTINGS)
        assert base.found is not None
        below = replace(SETTINGS, below_s=float(base.found.step_s[0]) * 0.995)
        known = Known(question=question, ways=base.ways)
        for feature, able in with_features(LITTLE).items():
            more = replace(question, capabilities=able)
            assert only_adds(more, question), feature
            whole, added = search(more, below), search(more, replace(below, known=known))
            if whole.found is None or added.found is None:
                wrong += [(name, feature)] * (whole.found is not added.found)
                continue
            gains.add(feature)
            if added.found.step_s[0] != pytest.approx(whole.found.step_s[0], rel=1e-12):
                wrong.append((name, feature))
            assert added.counts.priced <= whole.counts.priced
    assert not wrong
    assert len(gains) >= 4, gains


def test_every_decision_is_known_or_added(ask: MakeQuestion) -> None:
    question = ask(devices=16, capabilities=LITTLE, limits=FEW)
    known = Known(question=question, ways=ways_of(question))
    wrong = []
    for feature, able in with_features(LITTLE).items():
        more = replace(question, capabilities=able)
        ways, degrees = ways_of(more), legal_degrees(more)
        rows = degrees.rows(np.arange(degrees.num_cells))
        counts = [
            sum(len(chosen) * table.num_legal for table, chosen in kinds.sorted(rows))
            for kinds in (Kinds(ways=ways), Kinds(ways=ways, known=known))
        ]
        before = legal_degrees(question)
        rows_before = before.rows(np.arange(before.num_cells))
        counts.append(
            sum(
                len(chosen) * table.num_legal
                for table, chosen in Kinds(ways=ways_of(question)).sorted(rows_before)
            )
        )
        if counts[0] != counts[1] + counts[2]:
            wrong.append((feature, counts))
    assert not wrong


def test_a_target_that_lays_out_stages_otherwise_is_searched_anew(ask: MakeQuestion) -> None:
    question = ask(capabilities=replace(LITTLE, uneven_layout=False))
    assert not only_adds(replace(question, capabilities=LITTLE), question)
