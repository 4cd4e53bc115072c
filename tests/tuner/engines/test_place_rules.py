from tests.rows import each_row
from tuner.engines.place_capabilities import PLACE_TARGETS
from tuner.engines.place_rules import shape_refusals, table_refusals


def _refused(
    target: str, slots: tuple[int, ...], *, experts: int, layers: int | None = 61
) -> tuple[str, ...]:
    return shape_refusals(
        PLACE_TARGETS[target], slots_per_rank=slots, num_experts=experts, num_layers=layers
    )


def test_slots_that_no_even_number_of_ranks_can_hold_name_the_nearest() -> None:
    # 288 slots on 64 ranks: 32 ranks of 5 and 32 of 4.
    (line,) = _refused("sglang", (5,) * 32 + (4,) * 32, experts=256)
    assert "ranks hold 4 to 5 slots" in line
    assert line.endswith(
        "slots_per_rank 4 (redundant_experts 0) or slots_per_rank 5 (redundant_experts 64)"
    )


def test_only_counts_that_hold_every_expert_are_proposed() -> None:
    # 10 slots on 4 ranks for 9 experts: 2 a rank would hold 8.
    (line,) = _refused("eplb", (3, 3, 2, 2), experts=9)
    assert line.endswith("nearest: slots_per_rank 3 (redundant_experts 3)")


def test_megatron_names_the_nearest_ranks_that_divide_the_experts() -> None:
    (line,) = _refused("megatron", (9,) * 30, experts=256)
    assert line.endswith("redundant_experts 0 on 32 ranks")


def test_only_sglang_needs_the_model() -> None:
    needing = [name for name in PLACE_TARGETS if _refused(name, (4, 4), experts=8, layers=None)]
    assert needing == ["sglang"]


@each_row("target", PLACE_TARGETS)
def test_one_copy_of_each_expert_on_equal_ranks_suits_every_engine(target: str) -> None:
    assert _refused(target, (4, 4), experts=8) == ()
    assert (
        table_refusals(
            PLACE_TARGETS[target],
            physical_to_logical=((0, 1, 2, 3), (3, 2, 1, 0)),
            layer_ids=(3, 4),
            slots_per_rank=(2, 2),
        )
        == ()
    )


def test_the_first_pair_of_twins_is_named() -> None:
    (line,) = table_refusals(
        PLACE_TARGETS["vllm-ascend"],
        physical_to_logical=((0, 1, 2, 0), (2, 0, 1, 1)),
        layer_ids=(3, 4),
        slots_per_rank=(2, 2),
    )
    assert "layer 4 holds expert 1 twice on rank 1" in line
