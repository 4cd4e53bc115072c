from collections import Counter
from dataclasses import replace

import numpy as np

from tuner.config.columns import Numbers
from tuner.prices.lookups import MOST_LENGTHS, Lookups, NotedPrices
from tuner.prices.ops import Op, batched_gemm, gemm, memory_bound, on_rows, trained_experts


class OneSecond:
    def seconds(self, _: Op) -> Numbers:
        return 1.0


def test_every_lookup_is_noted_as_what_a_profiler_measures() -> None:
    lookups = Lookups()
    prices = NotedPrices(source=OneSecond(), lookups=lookups)
    experts = trained_experts(8.0, 32.0, hidden=64.0, ffn=16.0, inner=32.0).forward
    for op in (gemm(np.array([2.0, 2.0, 3.5]), 5.0, 7.0), memory_bound(6.0 * 4096 * 10), experts):
        assert prices.seconds(op) == 1.0
    assert {case.id for case in lookups.wanted().cases} == {
        "gemm/bf16/forward/m2-n5-k7",
        "gemm/bf16/forward/m4-n5-k7",
        "memory_bound/residual_add/bf16/forward/rows10-width4096",
        "grouped_gemm/bf16/forward/experts8-tokens256-largest32-hidden64-ffn16",
    }
    assert lookups.wanted().unmeasured == ()


def test_kernels_with_a_table_of_their_own_are_noted_under_its_name() -> None:
    lookups = Lookups()
    for is_backward in (False, True):
        lookups.note(on_rows("masked_fill", 10.0, 96.0, is_backward=is_backward))
    (case,) = lookups.wanted().cases
    assert case.id == "memory_bound/masked_fill/bf16/forward/rows10-width96"


def test_what_no_profiler_measures_is_named() -> None:
    lookups = Lookups()
    prices = NotedPrices(source=OneSecond(), lookups=lookups, dtype="fp8")
    plain = trained_experts(8.0, 32.0, hidden=64.0, ffn=16.0, inner=16.0).forward
    for op in (gemm(2.0, 5.0, 7.0), batched_gemm(4.0, 8.0, 8.0, 8.0), replace(plain, dtype="bf16")):
        prices.seconds(op)
    # A model without experts or dense layers has networks of width 0, which nothing runs.
    lookups.note(gemm(2.0, 0.0, 7.0, dtype="bf16"))
    wanted = lookups.wanted()
    assert wanted.unmeasured == ("batched_gemm bf16", "gemm fp8", "grouped_gemm bf16")
    assert wanted.cases == ()


def test_lengths_are_spread_and_the_most_used_widths_come_first() -> None:
    lookups = Lookups()
    lookups.note(gemm(np.array([1.0, 2.0]), 3.0, 3.0))
    lookups.note(gemm(np.arange(1.0, 1025.0), 5.0, 5.0))
    cases = lookups.wanted().cases
    widths = [case.axes["n"] for case in cases]
    assert widths == sorted(widths, reverse=True)
    assert Counter(widths)[3] == 2
    rows = [case.axes["m"] for case in cases if case.axes["n"] == 5]
    assert (rows[0], rows[-1]) == (1, 1024)
    assert len(rows) <= MOST_LENGTHS
