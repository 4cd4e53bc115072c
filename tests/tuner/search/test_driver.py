"""The driver on nodes of one decision each, whose times are at or above their bounds."""

from collections.abc import Iterator

import numpy as np

from tuner.arrays import Floats
from tuner.search.driver import BestFirst, Proof
from tuner.search.settings import SearchSettings

NODES = 200
SIZES = (4, 32)


class _Search(BestFirst):
    """A search whose nodes are single decisions, each of a layout of its own."""

    def __init__(self, settings: SearchSettings, time_s_N: Floats) -> None:
        super().__init__(settings)
        self.time_s_N = time_s_N
        self.found: list[int] = []

    def ranked(self) -> tuple[Floats, Iterator[tuple[int, ...]]]:
        self.found.sort(key=lambda node: float(self.time_s_N[node]))
        return self.time_s_N[self.found], ((node,) for node in self.found)

    def run(self, bound_s_N: Floats) -> Proof:
        for batch in self.best_first(bound_s_N, sizes=SIZES, count=len):
            self.found += batch.tolist()
            self.priced += len(batch)
            self.bound_s = min(self.bound_s, float(bound_s_N[batch].min()))
        return self.prove(legal=len(bound_s_N), illegal=0)


def _nodes(seed: int) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    bound_s_N = rng.uniform(1.0, 2.0, NODES)
    return bound_s_N, bound_s_N * rng.uniform(1.0, 1.3, NODES)


def test_the_best_and_all_within_the_band_are_found() -> None:
    for seed in range(8):
        bound_s_N, time_s_N = _nodes(seed)
        search = _Search(SearchSettings(top=3, band_ratio=0.1), time_s_N)
        proof = search.run(bound_s_N)
        wanted = np.flatnonzero(time_s_N <= max(np.sort(time_s_N)[2], time_s_N.min() * 1.1))
        assert set(wanted) <= set(search.found)
        assert 0 < proof.counts.bounded == NODES - proof.counts.priced
        assert proof.bound_s <= time_s_N.min() <= proof.complete_s
        assert proof.certify(time_s_N.min(), method="bounds").status == "feasible"


def test_steps_above_a_known_one_are_not_searched_for() -> None:
    bound_s_N, time_s_N = _nodes(0)
    search = _Search(SearchSettings(below_s=1.05), time_s_N)
    search.run(bound_s_N)
    assert set(search.found) == set(np.flatnonzero(bound_s_N <= 1.05))


def test_what_time_leaves_is_open_with_a_true_bound() -> None:
    for limit_s in range(8):
        bound_s_N, time_s_N = _nodes(limit_s)
        clock = map(float, range(NODES)).__next__
        settings = SearchSettings(top=NODES, time_limit_s=float(limit_s), clock=clock)
        proof = _Search(settings, time_s_N).run(bound_s_N)
        counts = proof.counts
        assert counts.open > 0 == counts.bounded
        assert counts.priced + counts.open == NODES
        assert proof.bound_s == bound_s_N.min()
        assert proof.complete_s <= np.sort(bound_s_N)[counts.priced]
        assert proof.certify(None, method="bounds").status == "unknown"


def test_a_search_of_nothing_is_infeasible() -> None:
    proof = _Search(SearchSettings(), np.zeros(0)).run(np.zeros(0))
    certificate = proof.certify(None, method="bounds")
    assert (certificate.status, certificate.bound) == ("infeasible", None)
