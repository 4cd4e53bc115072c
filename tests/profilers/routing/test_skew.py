import numpy as np
import pytest

from profilers.routing.recording import Recording
from profilers.routing.skew import skew


def of(counts: list[list[list[int]]]) -> Recording:
    array = np.array(counts, dtype=np.int64)
    ids = tuple(range(array.shape[1]))
    return Recording(model="", workload="", layer_ids=ids, top_k=None, count_PLE=array)


def test_skew_is_the_most_loaded_expert_over_the_mean() -> None:
    # Layer 0 sums to [400, 400], layer 1 to [600, 200]; its passes are 1.75 and 1.25.
    found = skew(of([[[300, 100], [350, 50]], [[100, 300], [250, 150]]]))
    assert (found.median, found.worst) == (1.25, 1.5)
    assert found.pass_median == 1.5
    assert found.pass_p99 == pytest.approx(1.75, abs=0.02)


def test_a_pass_without_tokens_has_no_skew() -> None:
    assert skew(of([[[300, 100]], [[0, 0]]])).pass_median == 1.5
