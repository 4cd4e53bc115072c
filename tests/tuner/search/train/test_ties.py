"""All rows at once are judged as tuner/search/ratios.py judges each decision."""

import time
from dataclasses import replace

import numpy as np
import pytest

from tests.expect import present
from tests.tuner.search.train.testing import make_problem
from tuner.catalog.manifest import Capabilities
from tuner.config.train import TrainDecision
from tuner.engines.megatron_lm.capabilities import MEGATRON_0_18
from tuner.engines.torchtitan.capabilities import TORCHTITAN_0_3
from tuner.search.ratios import KERNEL_FIELDS, Ratios, has_same_kernels, is_tie
from tuner.search.settings import SearchSettings
from tuner.search.train.candidates import Candidates
from tuner.search.train.search import search
from tuner.search.train.search_result import SearchOutcome, Solutions, solution_fields
from tuner.search.train.space_size import by_facts
from tuner.search.train.ties import DEGREE_OF, UNIFORM_FIELDS, tied_rows
from tuner.spec.search import Search

RATIOS = Ratios(same_kernels=(0.96, 1.05), other_kernels=(0.8, 1.25))
SETTINGS = SearchSettings(clock=time.perf_counter, top=200, band_ratio=1.0)
WAYS_OF_ROW = 4
NUM_CHOSEN = 60


def _searched(target: Capabilities, zero_stage: tuple[int, ...]) -> SearchOutcome:
    limits = Search(
        micro_batch_size=(1, 2),
        zero_stage=zero_stage,
        tensor_model_parallel_size=(1, 2),
        pipeline_model_parallel_size=(1, 2),
        virtual_pipeline_model_parallel_size=(1, 4),
    )
    outcome = search(
        make_problem("olmoe-1b-7b", devices=16, capabilities=target, limits=limits), SETTINGS
    )
    assert outcome.solutions is not None
    return outcome


@pytest.fixture(scope="module")
def searches() -> list[tuple[SearchOutcome, list[TrainDecision]]]:
    """Rows of two targets, and the decision of each."""
    outcome = (
        _with_other_options(_searched(MEGATRON_0_18, (0, 1))),
        _with_other_options(_searched(TORCHTITAN_0_3, (2, 3))),
    )
    return [(every, _decisions(every)) for every in outcome]


def _with_other_options(outcome: SearchOutcome) -> SearchOutcome:
    """Every row of a search with some other legal options, as if they took as long."""
    random, every, chosen = np.random.default_rng(22), list[Candidates](), list[int]()
    rows = present(outcome.solutions).candidates.rows
    for facts, like in by_facts(rows):
        legal = outcome.options.legal(facts)
        some = np.repeat(like, WAYS_OF_ROW)
        picked = legal[random.integers(len(legal), size=len(some))]
        options = {axis: picked[:, at] for at, axis in enumerate(outcome.options.choices)}
        every.append(
            Candidates(rows={name: column[some] for name, column in rows.items()}, options=options)
        )
        chosen.extend(some)
    candidates = every[0]
    for more in every[1:]:
        candidates = candidates.concat(more)
    at = np.array(chosen)
    both = present(outcome.solutions).concat(
        Solutions(
            candidates=candidates,
            step_s=present(outcome.solutions).step_s[at],
            peak_bytes=present(outcome.solutions).peak_bytes[at],
            layers_PC=present(outcome.solutions).layers_PC[:, at],
        )
    )
    return replace(outcome, solutions=both)


def _is_of_other_degrees(one: TrainDecision, other: TrainDecision) -> bool:
    return any(getattr(one, name) != getattr(other, name) for name in DEGREE_OF)


def _decisions(every: SearchOutcome) -> list[TrainDecision]:
    return [
        TrainDecision.model_validate(solution_fields(every, index))
        for index in range(len(present(every.solutions)))
    ]


@pytest.mark.slow
def test_rows_tie_where_their_decisions_do(
    searches: list[tuple[SearchOutcome, list[TrainDecision]]],
) -> None:
    wrong, seen = [], set[tuple[bool, bool, bool]]()
    for every, decisions in searches:
        step_s = present(every.solutions).step_s
        for index in range(0, len(decisions), max(1, len(decisions) // NUM_CHOSEN)):
            chosen, own_s = decisions[index], float(step_s[index])
            tied = tied_rows(every, RATIOS, chosen=chosen, step_s=own_s)
            for at, other in enumerate(decisions):
                band = RATIOS.between(chosen, other, ratio=float(step_s[at]) / own_s)
                expected = _is_of_other_degrees(chosen, other) and is_tie(band)
                if expected != tied[at]:
                    wrong.append((index, at))
                same_overlap = chosen.overlap_grad_reduce == other.overlap_grad_reduce
                seen.add((has_same_kernels(chosen, other), same_overlap, expected))
    assert not wrong, f"{len(wrong)} rows, e.g. {wrong[:5]}"
    # Same kernels under another overlap of gradients: what a comparison of all ways would miss.
    assert {(same, False, tied) for same in (True, False) for tied in (True, False)} <= seen


@pytest.mark.slow
def test_every_field_that_distinguishes_kernels_differs_somewhere(
    searches: list[tuple[SearchOutcome, list[TrainDecision]]],
) -> None:
    for name in UNIFORM_FIELDS:
        for _, decisions in searches:
            assert len({getattr(one, name) for one in decisions}) == 1, name
    decisions = [one for _, every in searches for one in every]
    for name in (*KERNEL_FIELDS, "chunks"):
        num_values = len({str(getattr(one, name)) for one in decisions})
        assert num_values > 1 or name in UNIFORM_FIELDS, f"{name} never differs"
