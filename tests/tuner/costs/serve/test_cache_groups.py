"""Blocks of layers that keep different things, by hand and against logs of vLLM."""

from dataclasses import replace

from tests.expect import present
from tests.tuner.models import example_model
from tuner.catalog.serve_rules.traits import BlockRule
from tuner.costs.serve.cache_groups import BlockPool, CacheGroup, block_pool
from tuner.costs.serve.decoder import Formats, decoder_of
from tuner.costs.serve.memory import layer_kv_bytes

BF16 = Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16")


def pool_of(name: str, *, ranks: int = 1, states: int = 2) -> BlockPool | None:
    layers = decoder_of(example_model(name)).layers
    return block_pool(
        layers,
        token_bytes=[layer_kv_bytes(one.attention, BF16, ranks) for one in layers],
        ranks=ranks,
        state_bytes=4.0,
        states=states,
    )


def test_windows_keep_what_is_in_flight_and_a_block_more() -> None:
    pool = present(pool_of("gpt-oss-120b"))
    # 18 layers of each kind, 8 heads of 64 in bf16, blocks of 16 tokens.
    assert pool.block_bytes == 18 * 16 * 2 * 8 * 64 * 2
    # 131,072 / 16, and ceil((127 + 8,192) / 16) + 1.
    assert pool.request_bytes(131_072, in_flight=8192) == (8192 + 521) * pool.block_bytes
    # Once it decodes, a request keeps its window alone.
    assert pool.request_bytes(131_072) == (8192 + 9) * pool.block_bytes


def test_chunks_are_not_windows() -> None:
    chunk = CacheGroup(window=8192, is_chunk=True)
    assert chunk.blocks(131_072, in_flight=8192) == 1024
    assert chunk.blocks(100, in_flight=8192) == 7


def test_states_share_blocks_with_as_many_tokens_of_keys() -> None:
    pool = present(pool_of("nemotron-3-nano"))
    # A state of 2,134,016 bytes takes 131 times 16 tokens of 1,024 bytes. 23 layers of states in
    # groups of 6, as many as there are with keys.
    assert pool.block_bytes == 6 * 131 * 16 * 1024
    assert pool.request_bytes(4192) == (4 * 2 + 2) * pool.block_bytes


def hybrid(*, layers: int, heads: int, values: int, ranks: int, kv: str, drafts: int) -> BlockPool:
    """Return the blocks of Qwen3.5's kind: every fourth layer attends, the rest have states."""
    own = decoder_of(example_model("qwen3.5-397b-a17b")).layers
    made = []
    for one in own:
        linear = one.attention.linear
        attention = replace(
            one.attention,
            kv_heads=heads,
            linear=linear and linear.model_copy(update={"num_value_heads": values}),
        )
        made.append(replace(one, attention=attention, count=one.count * layers // 60))
    formats = replace(BF16, kv=kv)
    return present(
        block_pool(
            made,
            token_bytes=[layer_kv_bytes(one.attention, formats, ranks) for one in made],
            ranks=ranks,
            state_bytes=4.0,
            states=2 + drafts,
            drafts=drafts,
        )
    )


def test_tokens_of_hybrids_are_those_of_logs() -> None:
    # vllm-project/recipes, Qwen3.8-27B.yaml (0.26.1rc1, two RTX 5090, bf16 and fp8 caches);
    # noonghunna/club-3090, issue 652 (0.24, RTX 5090) and AgentWorld's fp8.yml (0.25, two 3090).
    dense = {"layers": 64, "heads": 4, "values": 48, "ranks": 2, "drafts": 0}
    moe = {"layers": 40, "heads": 2, "values": 32, "drafts": 0, "kv": "fp8"}
    for sizes, longest, blocks, logged in (
        (dense | {"kv": "bf16"}, 262_144, 491, 377_456),
        (dense | {"kv": "bf16"}, 262_144, 580, 445_875),
        (dense | {"kv": "fp8"}, 262_144, 611, 920_517),
        (moe | {"ranks": 1}, 131_072, 300, 569_878),
        (moe | {"ranks": 2}, 262_144, 904, 1_795_289),
    ):
        pool = hybrid(**sizes)
        whole = pool.request_bytes(longest) / pool.block_bytes
        assert int(blocks / whole * longest) == logged, sizes


def test_drafts_widen_the_states_of_hybrids() -> None:
    # Qwen3.6-35B with six drafts, vLLM 0.22: 1,470,588 tokens are 4,250 blocks over 578, of which
    # 4 groups have 8 states and 3 have 182 blocks of 1,104 tokens; without them they have 1,056.
    pool = hybrid(layers=40, heads=2, values=32, ranks=1, kv="bf16", drafts=6)
    assert pool.block_bytes == 10 * 1104 * 2048
    assert pool.request_bytes(200_000) == (182 + 3 * 8) * pool.block_bytes
    assert int(4250 / (3 * 182 + 4 * 8) * 200_000) == 1_470_588


def test_layers_that_keep_the_same_need_no_groups() -> None:
    assert pool_of("deepseek-v3.2") is None
    assert pool_of("qwen3-30b-a3b") is None


def test_a_request_of_deepseek_v4_takes_blocks_of_five_groups() -> None:
    pool = present(pool_of("deepseek-v4-flash"))
    # 21 layers of 64 x 584 and 64 x 132 bytes and 20 of 2 x 584, each padded to 576.
    assert pool.block_bytes == 21 * (37_440 + 8_640) + 20 * 1728
    # vLLM 0.22 with 16,384 tokens a step: 6.66 GiB for 30,000 tokens, in blocks of 1,051,776 bytes
    # (comment in vLLM issue 44376): 118 + 2 x 259 + 4,099 + 2,065.
    blocks = pool.request_bytes(30_000, in_flight=16_384) / pool.block_bytes
    assert blocks == 118 + 2 * 259 + 4099 + 2065
    assert round(blocks * 1_051_776 / 2**30, 2) == 6.66
    # The longest that 5.44 GiB hold is 13,528 tokens.
    most = 5.445 * 2**30 // 1_051_776
    held = [
        pool.request_bytes(size, in_flight=16_384) / pool.block_bytes for size in (13528, 13540)
    ]
    assert held[0] <= most < held[1]


def test_two_steps_are_in_flight_where_the_next_is_scheduled_early() -> None:
    assert BlockRule().in_flight_tokens(8192, stages=1) == 16_384
    assert BlockRule().in_flight_tokens(8192, stages=4) == 5 * 8192
    assert BlockRule(overlaps_steps=False).in_flight_tokens(8192, stages=4) == 8192
