"""Splits of an instance by pool and model."""

from tests.rows import each_row
from tests.tuner.models import example_model
from tests.tuner.search.serve.testing import serving_pool
from tuner.costs.serve.decoder import decoder_of
from tuner.search.serve.degrees import LARGEST_INSTANCE, has_slow_links, instance_degrees


@each_row("model", ["mixtral-8x7b", "deepseek-v3", "llama-3.1-8b", "gpt-oss-20b"])
def test_every_split_deals_heads_experts_and_layers_out(model: str) -> None:
    decoder = decoder_of(example_model(model))
    pool = serving_pool(nodes=8).pool
    found = list(instance_degrees(pool, decoder))
    assert len(set(found)) == len(found)
    for one in found:
        assert one.devices <= min(LARGEST_INSTANCE, pool.num_devices)
        assert one.attention_tensor <= pool.domain
        assert all(group.attention.heads % one.attention_tensor == 0 for group in decoder.layers)
        assert one.pipeline == 1 or one.attention_data == 1
        if decoder.experts is None:
            assert (one.attention_data, one.expert, one.moe_tensor) == (1, 1, 1)
        else:
            ranks = one.attention_tensor * one.attention_data
            assert ranks == 1 or one.expert * one.moe_tensor == ranks
            assert decoder.experts.num % one.expert == 0


def test_machines_that_do_not_divide_the_experts_hold_copies() -> None:
    decoder = decoder_of(example_model("deepseek-v3"))
    for nodes, per_node, wide in (
        (9, 8, {24, 48, 72}),
        (18, 4, {12, 24, 36, 48, 72}),
        (5, 8, {24, 40}),
    ):
        pool = serving_pool(nodes=nodes, per_node=per_node).pool
        with_copies = {one.devices for one in instance_degrees(pool, decoder, has_copies=True)}
        without = {one.devices for one in instance_degrees(pool, decoder)}
        assert with_copies - without == wide, (nodes, per_node)
        assert all(size & (size - 1) == 0 for size in without)


def test_pipelines_come_after_all_that_needs_none() -> None:
    decoder = decoder_of(example_model("llama-3.1-8b"))
    stages = [one.pipeline for one in instance_degrees(serving_pool().pool, decoder)]
    assert stages == sorted(stages)
    assert max(stages) == 16


def test_cards_on_a_bus_have_slow_links() -> None:
    slow, fast = serving_pool("l40s"), serving_pool("h100-sxm")
    assert has_slow_links(slow.machine.sheet, slow.pool)
    assert not has_slow_links(fast.machine.sheet, fast.pool)


def test_tensor_degrees_are_those_that_heads_key_heads_and_networks_allow() -> None:
    read = example_model("llama-3.1-8b")
    for heads, key_heads, ffn, wanted in (
        (32, 8, 14336, {1, 2, 4, 8}),
        (40, 10, 17920, {1, 2, 5}),  # 4 ranks would share 10 key heads
        (40, 10, 14336, {1, 2}),  # its network is not dealt to 5
        (48, 8, 12288, {1, 2, 4, 8}),  # 3 and 6 neither divide 8 key heads nor copy them
        (36, 36, 9216, {1, 2, 3, 4, 6}),
    ):
        own = {"num_heads": heads, "num_kv_heads": key_heads}
        attention = read.attention.model_copy(update=own)
        model = read.model_copy(update={"attention": attention, "dense_ffn_size": ffn})
        pool = serving_pool(nodes=1).pool
        degrees = {
            one.attention_tensor
            for one in instance_degrees(pool, decoder_of(model))
            if one.pipeline == 1
        }
        assert degrees == wanted, (heads, key_heads)
