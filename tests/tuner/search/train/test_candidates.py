import numpy as np

from tuner.search.train.candidates import Candidates

NAMES = ("tensor", "context", "data", "micro_batch", "expert")


def test_candidates_of_huge_clusters_are_distinct() -> None:
    # Five columns of 2^16 values: what differs in the first alone is 2^64 apart.
    rows = {name: np.array([0, 0, 2**16 - 1]) for name in NAMES}
    rows["tensor"] = np.array([0, 1, 2**16 - 1])
    first, inverse = Candidates(rows=rows, options={}).same(NAMES)
    assert len(first) == 3
    assert inverse.tolist() == [0, 1, 2]


def test_columns_that_agree_share_one_entry() -> None:
    rows = {"tensor": np.array([2, 4, 2]), "data": np.array([1, 1, 1])}
    first, inverse = Candidates(rows=rows, options={}).same(("tensor", "data"))
    assert first.tolist() == [0, 1]
    assert inverse.tolist() == [0, 1, 0]
