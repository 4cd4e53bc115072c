from tests.rows import each_row
from tuner.catalog.place_rules import shape_refusals, table_refusals
from tuner.engines.placement.targets import PLACE_TARGETS


def _refused(
    target: str, slots: tuple[int, ...], *, experts: int, layers: int | None = 61
) -> tuple[str, ...]:
    return shape_refusals(
        PLACE_TARGETS[target], slots_per_rank=slots, num_experts=experts, num_layers=layers
    )


def test_slots_that_no_even_number_of_ranks_can_hold_name_the_fewest() -> None:
    # 288 slots on 64 ranks: 32 ranks of 5 and 32 of 4.
    (line,) = _refused("sglang", (5,) * 32 + (4,) * 32, experts=256)
    assert "ranks hold 4 to 5 slots" in line
    assert line.endswith("say one slots_per_rank, at least 4")
    # 10 slots on 4 ranks for 9 experts: 2 a rank would hold 8.
    (line,) = _refused("eplb", (3, 3, 2, 2), experts=9)
    assert line.endswith("say one slots_per_rank, at least 3")


def test_megatron_names_the_rule_of_its_ranks() -> None:
    (line,) = _refused("megatron", (9,) * 30, experts=256)
    assert line.endswith("say redundant_experts 0, and ranks that divide 256")


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
