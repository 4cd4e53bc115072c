import math
from itertools import accumulate

import numpy as np

from profilers.features import LINE_BYTES, detailed, plain
from profilers.kernels.grouped_gemm import row_counts
from profilers.records import AXES
from profilers.steps.loads import whole_blocks
from tests.expect import present
from tests.rows import each_row


def test_plain_and_finer_columns_by_hand() -> None:
    axes_NA = np.array([[3.0, 5.0, 7.0]])
    columns = plain(
        "gemm", kind="", dtype="fp32", direction="forward", axes_NA=axes_NA, calls_N=np.ones(1)
    )
    # 2 m n k and 4 bytes of m k, n k and m n elements
    assert columns.tolist() == [[1.0, 210.0, 4.0 * (21.0 + 35.0 + 15.0)]]
    assert detailed("copy", dtype="", axes_NA=np.ones((1, 1))) is None


def test_rows_that_fill_whole_vectors_have_no_ends() -> None:
    vector = LINE_BYTES // 2
    whole, odd = (
        detailed("memory_bound", dtype="bf16", axes_NA=np.array([[10.0, width]]))
        for width in (2.0 * vector, 2.0 * vector + 5.0)
    )
    # calls, elements, rows, elements beyond whole vectors, beyond pairs of them, of the first one
    assert present(whole).tolist() == [[1.0, 640.0, 10.0, 0.0, 0.0, 320.0]]
    assert present(odd).tolist() == [[1.0, 690.0, 10.0, 50.0, 50.0, 320.0]]


@each_row("operation", ["gemm", "grouped_gemm", "attention", "memory_bound", "kv_conversion"])
def test_no_column_is_negative_and_calls_come_first(operation: str) -> None:
    rng = np.random.default_rng(0)
    axes_NA = rng.integers(1, 5000, (50, len(AXES[operation]))).astype(np.float64)
    columns = present(detailed(operation, dtype="fp32", axes_NA=axes_NA))
    assert np.all(columns >= 0.0)
    assert np.all(columns[:, 0] == 1.0)


def test_blocks_of_queries_change_with_the_sequence() -> None:
    columns = present(
        detailed(
            "attention",
            dtype="bf16",
            axes_NA=np.array([[1.0, sequence, 1.0, 1.0, 8.0] for sequence in (191, 192, 767, 768)]),
        )
    )
    assert (columns[:, -2] > 0.0).tolist() == [True, False, False, False]
    assert (columns[:, -1] > 0.0).tolist() == [False, True, True, False]


@each_row("dtype", ["fp32", "bf16"])
@each_row(("sequence", "queries"), ((100, 32), (512, 64), (700, 64), (1040, 256), (1300, 256)))
def test_attention_computes_whole_blocks_of_keys_up_to_that_of_the_query(
    dtype: str, sequence: int, queries: int
) -> None:
    # Blocks of queries begin at these; each sees whole blocks of 512 keys, as far as there are any.
    score_flop, calls, tails = 0, 0, 0
    for first in range(0, sequence, queries):
        last = min(first + queries, sequence)
        blocks = math.ceil(last / 512)
        keys = min(512 * blocks, sequence)
        score_flop += (last - first) * keys
        calls += blocks
        # Scores are in fp32 whatever the operands are.
        tails += (last - first) * (keys % 16)
    columns = present(
        detailed("attention", dtype=dtype, axes_NA=np.array([[2.0, sequence, 3.0, 3.0, 8.0]]))
    )
    # calls, products, softmax, ends of rows of scores
    wanted = [6 * calls, 48 * score_flop, 6 * score_flop, 6 * tails]
    assert columns[0, 1:5].tolist() == wanted


def test_conversions_count_tokens_by_page_and_by_rank() -> None:
    columns = present(
        detailed(
            "kv_conversion",
            dtype="bf16",
            axes_NA=np.array(
                [[tokens, 8.0, 128.0, 16.0, 64.0, 1.0, 4.0] for tokens in (128.0, 48.0)]
            ),
        )
    )
    # 48 tokens are three pages of 16 and do not fill one of 64.
    assert columns[:, -2:].tolist() == [[0.0, 0.0], [0.0, 48.0]]
    columns = present(
        detailed(
            "kv_conversion",
            dtype="bf16",
            axes_NA=np.array(
                [[100.0, 1.0, 576.0, 64.0, 64.0, 1.0, receivers] for receivers in (1, 4)]
            ),
        )
    )
    # Tokens held, and those whose pages are not filled.
    assert columns[:, [2, -1]].tolist() == [[100.0, 100.0], [400.0, 400.0]]


@each_row(
    ("experts", "tokens", "largest"), [(1, 33, 33), (2, 34, 17), (8, 100, 30), (8, 2048, 512)]
)
def test_rows_of_experts_in_bf16_count_in_whole_blocks(
    experts: int, tokens: int, largest: int
) -> None:
    sizes = {"experts": experts, "tokens": tokens, "largest": largest, "hidden": 64, "ffn": 128}
    axes_NA = np.array([[float(sizes[axis]) for axis in AXES["grouped_gemm"]]])
    padded = {
        dtype: columns[0, 3] / (64 * 128)
        for dtype in ("bf16", "fp32")
        if (columns := detailed("grouped_gemm", dtype=dtype, axes_NA=axes_NA)) is not None
    }
    counts = row_counts(experts=experts, tokens=tokens, largest=largest)
    assert padded == {"bf16": sum(map(whole_blocks, counts)), "fp32": tokens}


@each_row(
    ("experts", "tokens", "largest"),
    # Split are, in turn: nobody; the last, twice; the only one; nobody; the first; nobody.
    [(5, 104, 40), (5, 120, 40), (5, 111, 40), (1, 18, 18), (1, 7, 7), (2, 134, 129), (5, 100, 40)],
)
def test_an_expert_is_a_call_and_one_that_is_split_another(
    experts: int, tokens: int, largest: int
) -> None:
    assert AXES["grouped_gemm"] == ("experts", "tokens", "largest", "hidden", "ffn")
    axes_NA = np.array([[float(experts), float(tokens), float(largest), 64.0, 128.0]])
    by_dtype = {
        dtype: columns[0].tolist()
        for dtype in ("bf16", "fp32")
        if (columns := detailed("grouped_gemm", dtype=dtype, axes_NA=axes_NA)) is not None
    }
    counts = row_counts(experts=experts, tokens=tokens, largest=largest)
    tails = accumulate(counts)
    is_split = [
        end - count + whole_blocks(count) > tokens for end, count in zip(tails, counts, strict=True)
    ]
    assert by_dtype["bf16"][1] == by_dtype["fp32"][1] == experts
    assert by_dtype["bf16"][10:] == [sum(is_split)]
    assert by_dtype["fp32"][10:] == []


@each_row(("dtype", "lanes"), [("bf16", 64), ("fp32", 32)])
def test_swiglu_of_experts_goes_on_by_elements_after_two_vectors(dtype: str, lanes: int) -> None:
    axes_NA = np.array([[2.0, 100.0, 50.0, 64.0, 128.0 + over] for over in (0, lanes - 1, lanes)])
    columns = present(detailed("grouped_gemm", dtype=dtype, axes_NA=axes_NA))
    assert columns[:, 9].tolist() == [0.0, 100.0 * (lanes - 1), 0.0]
