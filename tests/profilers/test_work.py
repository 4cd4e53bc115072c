import numpy as np
import pytest

from profilers.records import AXES
from profilers.work import PASSES, work
from tests.rows import each_row

PRODUCT = {"m": 2, "n": 3, "k": 5}


def of(
    operation: str,
    axes: dict[str, int],
    *,
    kind: str = "",
    dtype: str = "bf16",
    direction: str = "",
) -> tuple[float, float]:
    arrays = {name: np.array([float(size)]) for name, size in axes.items()}
    needed = work(operation, kind=kind, dtype=dtype, direction=direction, axes=arrays)
    return float(needed.flop[0]), float(needed.bytes[0])


def test_products_experts_and_attention_by_hand() -> None:
    # 2 * 2 * 3 * 5 flop; (2 * 5 + 3 * 5 + 2 * 3) elements of 2 bytes
    assert of("gemm", PRODUCT) == (60.0, 62.0)
    assert of("gemm", PRODUCT, direction="backward") == (120.0, 124.0)
    # 6 * 10 * 4 * 3 flop; 3 * 2 * 4 * 3 weights and 10 * (2 * 4 + 6 * 3) activations of 4 bytes
    size = {"experts": 2, "tokens": 10, "largest": 5, "hidden": 4, "ffn": 3}
    assert of("grouped_gemm", size, dtype="fp32") == (720.0, 4.0 * (72 + 260))
    # half of 4 B A S^2 D = 2 * 1 * 2 * 16 * 8; 1 * 4 * 8 * (2 * 2 + 2 * 1) elements
    size = {"batch": 1, "sequence": 4, "heads": 2, "kv_heads": 1, "head_dim": 8}
    assert of("attention", size) == (512.0, 384.0)
    assert of("attention", size, direction="backward") == (1280.0, 768.0)


@each_row("kind", sorted(PASSES))
def test_memory_bound_work_grows_with_rows_and_width(kind: str) -> None:
    _, once = of("memory_bound", {"rows": 10, "width": 20}, kind=kind)
    _, twice = of("memory_bound", {"rows": 20, "width": 20}, kind=kind)
    assert twice == 2.0 * once > 0.0


def test_collectives_move_their_share_whatever_their_kernel() -> None:
    size = {"bytes": 800, "ranks": 4, "stride": 1, "world": 4}
    assert of("collective", size, kind="all_reduce")[1] == 1200.0
    assert of("collective", size, kind="all_to_all")[1] == 600.0
    assert of("collective", size, kind="send_recv")[1] == 800.0
    size = {"bytes": 64, "ranks": 4, "stride": 1, "world": 4}
    assert of("collective", size, kind="all_reduce/vllm") == of(
        "collective", size, kind="all_reduce"
    )


@each_row(
    ("kind", "dtype", "expected"),
    # 10 parameters. fp32 totals are read and written: 4 + 4, gradients 2 or 4; converting reads 4.
    [
        ("adamw", "fp32", 280.0),
        ("accumulate", "bf16", 100.0),
        ("accumulate", "fp32", 120.0),
        ("convert", "bf16", 60.0),
    ],
)
def test_parameters_are_read_and_written_by_hand(kind: str, dtype: str, expected: float) -> None:
    assert of("optimizer", {"parameters": 10}, kind=kind, dtype=dtype) == (0.0, expected)


@each_row("operation", sorted(AXES))
def test_every_operation_has_work(operation: str) -> None:
    flop, moved = of(operation, dict.fromkeys(AXES[operation], 8), kind="write")
    assert flop + moved > 0.0


@each_row(
    ("operation", "axes", "flop", "moved"),
    [
        # 4 * 2 * 8 * 64 * 100 flop for one token each; keys and values of 100 tokens, 2 bytes
        (
            "decode_attention",
            {"batch": 2, "past": 100, "heads": 8, "kv_heads": 4, "head_dim": 64, "window": 0},
            4 * 2 * 8 * 64 * 100,
            2 * 2 * 100 * 64 * 2 * 4,
        ),
        # A window of 10 hides the other 90.
        (
            "decode_attention",
            {"batch": 2, "past": 100, "heads": 8, "kv_heads": 4, "head_dim": 64, "window": 10},
            4 * 2 * 8 * 64 * 10,
            2 * 2 * 10 * 64 * 2 * 4,
        ),
        # 64 * 2 / 4 = 32 rows on a rank of 2 experts, 6 * 32 * 16 * 8 flop
        (
            "moe",
            {
                "tokens": 64,
                "hidden": 16,
                "ffn": 8,
                "top_k": 2,
                "experts": 8,
                "tensor": 1,
                "expert": 4,
            },
            6 * 32 * 16 * 8,
            2 * (3 * 2 * 16 * 8 + 32 * (2 * 16 + 6 * 8)),
        ),
        (
            "latent_decode",
            {"batch": 3, "past": 7, "heads": 2},
            2 * 3 * 2 * 7 * 1088,
            2 * 3 * 7 * 576,
        ),
        (
            "latent_attention",
            {"batch": 1, "sequence": 4, "heads": 2},
            2 * 16 * 320,
            2 * 4 * 2 * 640,
        ),
        (
            "expert_all_to_all",
            {
                "tokens": 5,
                "hidden": 16,
                "top_k": 2,
                "experts": 8,
                "ranks": 8,
                "nodes": 1,
                "units": 0,
            },
            0,
            2 * 5 * 2 * 16,
        ),
    ],
)
def test_imported_operations_by_hand(
    operation: str, axes: dict[str, int], flop: float, moved: float
) -> None:
    assert of(operation, axes) == (flop, moved)


def test_a_window_that_holds_the_whole_sequence_is_plain_attention() -> None:
    plain = {"batch": 1, "sequence": 16, "heads": 2, "kv_heads": 1, "head_dim": 8}
    assert of("windowed_attention", plain | {"window": 16}) == of("attention", plain)
    assert of("windowed_attention", plain | {"window": 2})[0] < of("attention", plain)[0]
    with pytest.raises(ValueError, match="'dance'"):
        of("dance", {"steps": 3})
