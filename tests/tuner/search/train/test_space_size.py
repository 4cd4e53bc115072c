"""Searches that leave out what was searched before, beside searches of everything."""

import time
from dataclasses import replace

import numpy as np
import pytest

from profilers.steps.config import Recompute
from tests.expect import present
from tests.tuner.search.train.testing import make_problem
from tuner.catalog.manifest import Capabilities
from tuner.search.settings import SearchSettings
from tuner.search.train.degrees import legal_degrees
from tuner.search.train.options import option_space
from tuner.search.train.relaxations import with_features
from tuner.search.train.search import search
from tuner.search.train.space_size import OptionTables, SearchedSpace, only_adds
from tuner.spec.search import Search

SETTINGS = SearchSettings(clock=time.perf_counter, time_limit_s=60.0, top=1)

LITTLE = Capabilities(
    names=("little",),
    zero_stages=frozenset({0, 1}),
    zero_stages_with_pipeline=frozenset({0}),
    shard_ranks_zero_stages=frozenset(),
    overlap_grad_reduce=False,
    overlap_param_gather=False,
    recompute=frozenset({Recompute.NONE, Recompute.FULL}),
    recompute_num_layers=False,
    optimizer_offload_zero_stages=frozenset(),
    largest_chunks=1,
    schedules=frozenset({"1f1b"}),
    virtual_pipeline=False,
    context_parallel=False,
    expert_tensor_parallel=False,
    expert_folding=False,
    dispatchers=frozenset({"alltoall"}),
    cuda_graphs=frozenset({"none"}),
)
"""A target that lacks nearly every feature."""

FEW = Search(micro_batch_size=(1, 2), optimizer_offload=(False,))


@pytest.mark.slow
def test_what_a_feature_adds_has_its_fastest_decision() -> None:
    problems = {
        "roomy": make_problem(devices=16, capabilities=LITTLE, limits=FEW),
        "full": make_problem(devices=16, capabilities=LITTLE, limits=FEW, memory_limit_bytes=14e9),
    }
    wrong, gains = [], set[str]()
    for name, problem in problems.items():
        base = search(problem, SETTINGS)
        below = replace(SETTINGS, below_s=float(present(base.solutions).step_s[0]) * 0.995)
        known = SearchedSpace(problem=problem, options=base.options)
        for feature, able in with_features(LITTLE).items():
            more = replace(problem, capabilities=able)
            assert only_adds(more, problem) is not able.fp8_dispatch, feature
            if able.fp8_dispatch:
                continue
            whole, added = search(more, below), search(more, below, known=known)
            if whole.solutions is None or added.solutions is None:
                wrong += [(name, feature)] * (whole.solutions is not added.solutions)
                continue
            gains.add(feature)
            if added.solutions.step_s[0] != pytest.approx(whole.solutions.step_s[0], rel=1e-12):
                wrong.append((name, feature))
            assert added.proof.counts.priced <= whole.proof.counts.priced
    assert not wrong
    assert len(gains) >= 4, gains


def test_every_decision_is_known_or_added() -> None:
    problem = make_problem(devices=16, capabilities=LITTLE, limits=FEW)
    known = SearchedSpace(problem=problem, options=option_space(problem))
    for feature, able in with_features(LITTLE).items():
        more = replace(problem, capabilities=able)
        options, degrees = option_space(more), legal_degrees(more)
        rows = degrees.rows(np.arange(degrees.num_partials))
        counts = [
            sum(len(chosen) * table.num_legal for table, chosen in kinds.by_kind(rows))
            for kinds in (OptionTables(options=options), OptionTables(options=options, known=known))
        ]
        before = legal_degrees(problem)
        rows_before = before.rows(np.arange(before.num_partials))
        tables = OptionTables(options=option_space(problem))
        counts.append(
            sum(len(chosen) * table.num_legal for table, chosen in tables.by_kind(rows_before))
        )
        assert counts[0] == counts[1] + counts[2], (feature, counts)


def test_a_target_of_other_layouts_is_searched_in_full() -> None:
    problem = make_problem(capabilities=replace(LITTLE, uneven_layout=False))
    assert not only_adds(replace(problem, capabilities=LITTLE), problem)
