from collections.abc import Callable

import pytest

from tuner.costs.reference.workload import StepDegrees, Workload

Make = Callable[..., Workload]
Cut = Callable[..., StepDegrees]


def test_degrees_multiply_to_devices(cut: Cut) -> None:
    degrees = cut(tensor=2, data=4, pipeline=3, virtual_pipeline=2, expert=8)
    assert (degrees.ranks_per_stage, degrees.expert_data) == (8, 1)
    assert (degrees.world, degrees.num_stages) == (24, 6)


def test_balanced_experts_share_the_copies_of_a_sequence(tiny_work: Make) -> None:
    assert tiny_work(layers="mm").copies_LE == ((16,) * 8,) * 2


def test_loads_are_counted_layer_by_layer(tiny_work: Make) -> None:
    one, other = (0.5, *(0.5 / 7,) * 7), (*(0.5 / 7,) * 7, 0.5)
    work = tiny_work(layers="mdm", batch={"load_ratio": (one, other)})
    assert work.moe_index == (0, None, 1)
    # Half of the 128 copies of a sequence is one for each of its 64 tokens.
    assert work.copies_LE[0][0] == work.copies_LE[1][7] == 64
    assert {sum(row) for row in work.copies_LE} == {128}


def test_an_expert_group_receives_what_its_sequences_send(tiny_work: Make, cut: Cut) -> None:
    work = tiny_work(layers="m")
    # Groups of 4 data ranks bring 4 * 2 sequences, of 2 tensor ranks the 2 of their one replica.
    assert work.received(cut(data=4, expert=4), 0) == ((128, 128),) * 4
    assert work.received(cut(tensor=2, expert=2), 0) == ((32,) * 4,) * 2


def test_tokens_and_micro_batches_follow_the_degrees(tiny_work: Make, cut: Cut) -> None:
    degrees = cut(tensor=2, data=2, micro_batch_size=1)
    assert tiny_work().tokens(degrees) == 32
    assert tiny_work().num_microbatches(degrees) == 4


def test_a_dense_model_receives_nothing(tiny_work: Make, cut: Cut) -> None:
    work = tiny_work(layers="dd")
    assert work.copies_LE == ()
    with pytest.raises(ValueError, match="without experts"):
        work.received(cut(), 0)
