"""Peak memory of ranks: published runs by hand, and properties of the counts.

A toy of 8 layers whose every part can be followed: 2 ranks, hidden 64, vocabulary 1,024, bf16.
"""

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import Hardware, ModelShape, Stages, stacked
from tuner.costs.train.memory import assemble_memory, price_memory
from tuner.costs.train.memory_constants import (
    OF_FAMILY,
    MemoryConstants,
    memory_constants,
)
from tuner.costs.train.memory_units import unit_bytes
from tuner.costs.train.prices import MemoryPrice
from tuner.prices.train.constants import Software

GIB = 2.0**30
MACHINE = Hardware(
    matmul_flop_per_s=1e15,
    attention_flop_per_s=1e15,
    compute_units=132.0,
    memory_bytes=80.0 * GIB,
    memory_bytes_per_s=3e12,
    scale_up_bytes_per_s=4.5e11,
    domain=8.0,
    devices_per_node=8.0,
    scale_out_bytes_per_s=5e10,
)
NOTHING_ELSE = MemoryConstants(
    gathers_master=1.0, live_bytes=0.0, unused_ratio=0.0, context_bytes=0.0
)


def _dense(
    *, hidden: float, heads: float, kv_heads: float, ffn: float, layers: float
) -> ModelShape:
    return ModelShape(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden / heads,
        value_dim=hidden / heads,
        dense_ffn=ffn,
        vocab=128256.0,
        dense_layers=layers,
    )


LLAMA_8B = _dense(hidden=4096.0, heads=32.0, kv_heads=8.0, ffn=14336.0, layers=32.0)
LLAMA_70B = _dense(hidden=8192.0, heads=64.0, kv_heads=8.0, ffn=28672.0, layers=80.0)
QWEN3_30B = ModelShape(
    hidden=2048.0,
    heads=32.0,
    kv_heads=4.0,
    head_dim=128.0,
    value_dim=128.0,
    has_qk_norm=1.0,
    vocab=151936.0,
    dense_layers=0.0,
    moe_layers=48.0,
    experts=128.0,
    top_k=8.0,
    moe_ffn=768.0,
)
TOY = dataclasses.replace(
    _dense(hidden=64.0, heads=4.0, kv_heads=4.0, ffn=256.0, layers=8.0), vocab=1024.0
)


def _stages(dense: list[float], moe: list[float], mtp: float = 0.0) -> Stages:
    def grid(values: list[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return np.array(values, dtype=np.float64)[:, None]

    ends = [0.0] * (len(dense) - 1)
    return Stages(
        dense_SC=grid(dense),
        moe_SC=grid(moe),
        embedding_SC=grid([1.0, *ends]),
        head_SC=grid([*ends, 1.0]),
        mtp_SC=grid([*ends, mtp]),
    )


def _price(
    model: ModelShape,
    strategies: Strategies,
    stages: Stages,
    constants: MemoryConstants = NOTHING_ELSE,
) -> MemoryPrice:
    return price_memory(model, strategies, MACHINE, stages, constants=constants)


def test_llama_70b_on_32_h100_is_near_the_published_peak() -> None:
    # Megatron-Bridge's recompute notes: 55.6 GB with TP 4, PP 4, VPP 5, DP 2, fp8, mlp recomputed,
    # bf16 gradients, one sequence of 4,096 tokens.
    strategy = Strategies(
        sequence=4096.0,
        micro_batch=1.0,
        num_microbatches=16.0,
        tensor=4.0,
        pipeline=4.0,
        virtual_pipeline=5.0,
        data=2.0,
        gradient_bytes=2.0,
        linear_bytes=1.0,
        recompute_mlp=1.0,
    )
    price = _price(LLAMA_70B, strategy, _stages([4.0] * 20, [0.0] * 20), MemoryConstants())
    assert float(price.allocated_PC.max()) / 1e9 == pytest.approx(55.6, rel=0.03)
    assert int(price.allocated_PC.argmax()) == 0


@each_row(("gradient_bytes", "low", "high"), [(2.0, 56.0, 58.0), (4.0, 62.0, 64.0)])
def test_qwen3_30b_on_16_h100_is_near_the_published_peak(
    gradient_bytes: float, low: float, high: float
) -> None:
    # Megatron-Bridge's notes on hardware: 62.166, GB or GiB unstated, with EP 16. As GB that is
    # 57.9 GiB, the model's with bf16 gradients; as GiB it is the model's with fp32 ones.
    strategy = Strategies(
        sequence=4096.0,
        micro_batch=1.0,
        num_microbatches=64.0,
        data=16.0,
        expert=16.0,
        gradient_bytes=gradient_bytes,
    )
    price = _price(QWEN3_30B, strategy, _stages([0.0], [48.0]), MemoryConstants())
    assert low <= float(price.reserved_PC.max()) / GIB <= high


def test_sharded_state_takes_16_bytes_of_a_parameter() -> None:
    # torchtitan, 8 to 128 devices: 16.07 bytes per parameter and device fit published peaks.
    data = np.array([8.0, 16.0, 32.0, 64.0, 128.0])
    strategy = Strategies(
        sequence=8192.0, micro_batch=2.0, num_microbatches=1.0, data=data, zero_stage=3.0
    )
    price = _price(LLAMA_8B, strategy, _stages([32.0], [0.0]), MemoryConstants(gathers_master=1.0))
    parameters = 32 * 218_112_000 + 2 * 128256 * 4096
    slope = np.diff(price.total_PC[0]) / np.diff(1.0 / data) / parameters
    assert slope == pytest.approx([16.0] * 4, rel=2e-3)


HEAD_BYTES = 16 * (2 * 64 * 2 + 4 + 2 * 1024)


STAGE_PARAMETERS = 4 * 65_664 + 65_536


def test_every_part_of_a_small_pipeline_by_hand() -> None:
    # 2 ranks of 4 layers, DP 2; 16 tokens a micro-batch, 4 micro-batches. A layer has
    # 4 * 64 * 64 + 3 * 64 * 256 matrices and 128 norms = 65,664 parameters, an end 65,536.
    strategy = Strategies(
        sequence=16.0, micro_batch=1.0, num_microbatches=4.0, pipeline=2.0, data=2.0
    )
    price = _price(TOY, strategy, _stages([4.0, 4.0], [0.0, 0.0]))
    assert price.weights_PC[:, 0].tolist() == [2 * STAGE_PARAMETERS] * 2
    assert price.gradients_PC[:, 0].tolist() == [4 * STAGE_PARAMETERS] * 2
    assert price.optimizer_PC[:, 0].tolist() == [12 * STAGE_PARAMETERS / 2] * 2
    # Per token and layer: 4 * 64 * 2 residuals and norm outputs, 8 scales, 4 * 64 * 2 attention,
    # 4 * 4 log-sum-exp, 3 * 256 * 2 network. Rank 0 holds 2 micro-batches, rank 1 one.
    layer = 16 * (512 + 8 + 512 + 16 + 1536)
    assert price.activations_PC[:, 0].tolist() == [2 * 4 * layer, 4 * layer + HEAD_BYTES]
    # Rank 0: gradients of a network 2 * 256 * 2 and 64 * 2 per token; rank 1: of the head's input
    # and weights. Both: a weight gradient of each shape in bf16, and what is received ahead.
    both = 2 * 65_664 + 16 * 128
    assert price.buffers_PC[0, 0] == 16 * (1024 + 128) + both
    assert price.buffers_PC[1, 0] == 16 * 128 + 2 * 65_536 + both


def test_tied_embeddings_count_once_on_one_rank_and_twice_on_two() -> None:
    tied = dataclasses.replace(TOY, is_tied=1.0)
    one = Strategies(sequence=16.0, micro_batch=1.0, num_microbatches=4.0)
    two = dataclasses.replace(one, pipeline=2.0)
    apart = _price(TOY, one, _stages([8.0], [0.0])).weights_PC.sum()
    assert apart - _price(tied, one, _stages([8.0], [0.0])).weights_PC.sum() == 2 * 65_536
    assert _price(tied, two, _stages([4.0, 4.0], [0.0, 0.0])).weights_PC.sum() == apart


def test_predicted_tokens_bring_a_layer_a_projection_an_embedding_and_logits() -> None:
    strategy = Strategies(sequence=16.0, micro_batch=1.0, num_microbatches=4.0, pipeline=2.0)
    plain = _price(TOY, strategy, _stages([4.0, 4.0], [0.0, 0.0]))
    predicting = _price(TOY, strategy, _stages([4.0, 4.0], [0.0, 0.0], mtp=1.0))
    added = (predicting.weights_PC - plain.weights_PC)[:, 0]
    assert added.tolist() == [0.0, 2 * (65_664 + 2 * 64 * 64 + 65_536)]
    more = (predicting.activations_PC - plain.activations_PC)[1, 0]
    assert more == HEAD_BYTES + 16 * (512 + 8 + 512 + 16 + 1536 + 256)


TWO_STAGES = _stages([4.0, 4.0], [0.0, 0.0])


def test_a_sharded_stage_of_a_pipeline_is_gathered_as_a_whole() -> None:
    strategy = Strategies(
        sequence=16.0,
        micro_batch=1.0,
        num_microbatches=4.0,
        pipeline=2.0,
        data=4.0,
        zero_stage=3.0,
    )
    price = _price(TOY, strategy, _stages([4.0, 4.0], [0.0, 0.0]))
    assert price.weights_PC[0, 0] == STAGE_PARAMETERS
    assert price.buffers_PC[0, 0] == 16 * (1024 + 128) + 6 * STAGE_PARAMETERS + 16 * 128
    # FSDP2: 2 bytes of a layer's parameters where they are gathered to, 2 of its gradients.
    apart = dataclasses.replace(NOTHING_ELSE, has_gather_buffer=1.0)
    more = _price(TOY, strategy, _stages([4.0, 4.0], [0.0, 0.0]), apart)
    assert more.buffers_PC[0, 0] - price.buffers_PC[0, 0] == (2 + 2) * 65_664
    # It sums gradients in a stage that keeps its parameters as it does in one that gathers them.
    keeps = dataclasses.replace(strategy, zero_stage=2.0)
    apart_2, others = (_price(TOY, keeps, TWO_STAGES, own) for own in (apart, NOTHING_ELSE))
    assert apart_2.buffers_PC[0, 0] - others.buffers_PC[0, 0] == 4 * STAGE_PARAMETERS


def test_pytorchs_stages_hold_a_buffer_for_every_micro_batch_and_once_kept_results() -> None:
    # 4 ranks, 6 micro-batches; a boundary has 16 * 64 bf16 numbers. Rank 1 holds 3 micro-batches,
    # whose received activations are its first layer's inputs; logits have 16 * 1024 bf16 numbers.
    strategy = Strategies(sequence=16.0, micro_batch=1.0, num_microbatches=6.0, pipeline=4.0)
    stages = _stages([2.0] * 4, [0.0] * 4)
    ahead = dataclasses.replace(NOTHING_ELSE, receives_ahead=1.0)

    def buffers(constants: MemoryConstants, own: float = 0.0) -> npt.NDArray[np.float64]:
        return _price(TOY, strategy, stages, constants).buffers_PC[:, 0] - 2048.0 * own

    now = buffers(ahead)
    received = [6 * 2048, (6 - 3 + 6) * 2048, (6 - 2 + 6) * 2048, (6 - 1) * 2048]
    assert (now - buffers(NOTHING_ELSE, 1.0)).tolist() == received
    # Outputs but of the last rank, gradients of inputs but of the first; logits of 5 before.
    outputs, gradients, logits = (
        (buffers(kept) - now).tolist()
        for kept in (
            dataclasses.replace(ahead, keeps_outputs=1.0),
            dataclasses.replace(ahead, keeps_input_gradients=1.0),
            dataclasses.replace(ahead, keeps_logits=1.0),
        )
    )
    assert outputs == [6 * 2048, 6 * 2048, 6 * 2048, 0]
    assert gradients == [0, 6 * 2048, 6 * 2048, 6 * 2048]
    assert logits == [0, 0, 0, 5 * 16 * 1024 * 2]


def test_releases_of_torchtitan_keep_what_their_pytorch_kept() -> None:
    # outputs until May 2025, gradients of inputs and logits until October 2025.
    kept = {
        name: (
            OF_FAMILY[name].keeps_outputs,
            OF_FAMILY[name].keeps_input_gradients,
            OF_FAMILY[name].keeps_logits,
        )
        for name in ("torchtitan-2024", "torchtitan-2025", "torchtitan")
    }
    assert kept == {
        "torchtitan-2024": (1.0, 1.0, 1.0),
        "torchtitan-2025": (0.0, 1.0, 1.0),
        "torchtitan": (0.0, 0.0, 0.0),
    }


def test_software_that_no_constants_of_memory_are_known_of_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no memory constants are known of 'titan'; those known"):
        memory_constants([Software.TORCH_FSDP], ["titan"])


def test_whole_gradients_of_a_chunk_go_before_the_next_ones_come() -> None:
    # 2 ranks of 2 chunks of 3 and 1 layers; fp32 gradients of 65,664 parameters each.
    strategy = Strategies(
        sequence=16.0,
        micro_batch=1.0,
        num_microbatches=4.0,
        pipeline=2.0,
        virtual_pipeline=2.0,
        data=4.0,
        zero_stage=3.0,
    )
    stages = _stages([3.0, 3.0, 1.0, 1.0], [0.0] * 4)
    few = dataclasses.replace(strategy, num_microbatches=2.0)
    more = _price(TOY, strategy, stages).buffers_PC - _price(TOY, few, stages).buffers_PC
    # The embedding goes with the first rank's larger chunk, the head with the last one's smaller.
    assert more[:, 0].tolist() == [4 * 65_664, 4 * (65_664 + 65_536)]


def test_only_pytorchs_tensor_parallelism_holds_what_it_gathered() -> None:
    strategy = Strategies(
        sequence=16.0,
        micro_batch=1.0,
        num_microbatches=1.0,
        tensor=4.0,
        pipeline=2.0,
        sequence_parallel=1.0,
        recompute_full=1.0,
    )
    held = dataclasses.replace(NOTHING_ELSE, gathers_inputs=1.0)
    first, second = (
        float(_price(TOY, strategy, TWO_STAGES, constants).allocated_PC[0, 0])
        for constants in (NOTHING_ELSE, held)
    )
    # Two inputs of 16 tokens where a rank has 4; two partial gradients and their new layout.
    assert second - first == (2 * 12 + 3 * 16) * 64 * 2
    isolated = dataclasses.replace(strategy, tensor=1.0, sequence_parallel=0.0)
    assert np.array_equal(
        _price(TOY, isolated, TWO_STAGES).total_PC, _price(TOY, isolated, TWO_STAGES, held).total_PC
    )


def test_offloaded_activations_leave_the_device_but_not_the_logits() -> None:
    strategy = Strategies(sequence=16.0, micro_batch=1.0, num_microbatches=1.0)
    stages = _stages([8.0], [0.0])
    whole = _price(TOY, strategy, stages).activations_PC[0, 0]
    half = _price(TOY, dataclasses.replace(strategy, activation_offload=0.5), stages)
    assert half.activations_PC[0, 0] - HEAD_BYTES == (whole - HEAD_BYTES) / 2


def test_the_layer_at_work_keeps_its_activations_on_the_device() -> None:
    strategy = Strategies(sequence=4096.0, micro_batch=1.0, num_microbatches=1.0, pipeline=2.0)
    away = dataclasses.replace(strategy, activation_offload=1.0)
    one, two = _stages([0.0] * 2, [1.0] * 2), _stages([0.0] * 2, [2.0] * 2)
    first = [
        float(_price(QWEN3_30B, strategies, stages, NOTHING_ELSE).total_PC[0, 0])
        for strategies in (strategy, away)
        for stages in (one, two)
    ]
    assert first[2] == pytest.approx(first[0])
    assert first[3] < first[1]


@each_row("dispatcher", ["is_deepep", "is_hybridep"])
def test_dispatchers_hold_buffers_of_their_own(dispatcher: str) -> None:
    strategy = Strategies(
        sequence=4096.0, micro_batch=1.0, num_microbatches=1.0, data=32.0, expert=32.0
    )
    stages = _stages([0.0], [48.0])
    plain = _price(QWEN3_30B, strategy, stages)
    own = _price(QWEN3_30B, dataclasses.replace(strategy, **{dispatcher: 1.0}), stages)
    added = float((own.buffers_PC - plain.buffers_PC)[0, 0])
    token = 2048 * 2
    expected = {
        "is_deepep": 10 * (8 * 256 + 2 * 128 * 4) * token,
        "is_hybridep": 32 * 4096 * token,
    }
    assert added == pytest.approx(expected[dispatcher])


def test_allocator_and_context_are_separate_figures() -> None:
    strategy = Strategies(sequence=16.0, micro_batch=1.0, num_microbatches=1.0, partial_graph=1.0)
    constants = MemoryConstants(
        live_bytes=100.0, unused_ratio=0.5, context_bytes=1000.0, graph_ratio=0.25
    )
    price = _price(TOY, strategy, _stages([8.0], [0.0]), constants)
    moving = price.activations_PC + price.buffers_PC
    graphs = 0.25 * (price.activations_PC - HEAD_BYTES)
    assert np.allclose(price.reserve_PC, 0.5 * moving + graphs)
    assert np.allclose(price.reserved_PC, price.allocated_PC + price.reserve_PC)
    assert np.allclose(price.total_PC, price.reserved_PC + 1000.0)


def test_losses_differ_by_software_and_by_split() -> None:
    names = ["torchtitan", "torchtitan-2024", "llm-foundry", "automodel", ""]
    constants = memory_constants([Software.TORCH_FSDP] * 4 + [Software.MEGATRON_2025], names)
    assert np.asarray(constants.logit_bytes).tolist() == [4.0, 14.0, 4.0, 6.0, 2.0]
    assert np.asarray(constants.split_logit_bytes).tolist() == [0.0, 4.0, 0.0, 2.0, 0.0]
    assert np.asarray(constants.master_bytes).tolist() == [4.0, 4.0, 4.0, 2.0, 4.0]
    strategy = Strategies(sequence=16.0, micro_batch=1.0, num_microbatches=1.0, tensor=2.0)
    saved = [
        unit_bytes(TOY, strategy, MACHINE, constants=OF_FAMILY[name]).head_saved_C[0]
        for name in ("torchtitan", "torchtitan-2024")
    ]
    assert saved[1] - saved[0] == 14 * 16 * 1024 / 2


def test_an_eager_loss_reserves_the_logits_a_second_time() -> None:
    """Its tensors in order through an allocator of one segment that takes the best fit."""
    names = ["torchtitan-2024", "torchtitan-2024-compiled"]
    constants = memory_constants([Software.TORCH_FSDP] * 2, names)
    whole = "logits:2 fp32:4 output:4 -fp32 -logits loss:4 gradient:4 -loss -output last:2"
    split = (
        "logits:2 fp32:4 shifted:4 exp:4 -exp output:4 -shifted -fp32 -logits"
        " loss:4 exp:4 sum:4 -exp gradient:4 -sum -loss -output last:2"
    )
    whole_bytes = np.asarray(constants.logit_bytes)
    assert whole_bytes.tolist() == [_reserved(whole)] * 2
    # Transformers' loss under DeepSpeed: the segment of the bf16 logits holds no fp32 tensor.
    assert OF_FAMILY["deepspeed-transformers"].logit_bytes == _reserved(whole)
    assert (whole_bytes + constants.split_logit_bytes).tolist() == [_reserved(split)] * 2


def _reserved(script: str) -> int:
    """Bytes that an allocator ends with: `name:bytes` allocates, `-name` frees."""
    memory: list[str] = []
    for step in script.split():
        if step.startswith("-"):
            memory = ["" if name == step[1:] else name for name in memory]
            continue
        name, size = step.split(":")
        starts = [
            at for at in range(len(memory)) if memory[at] == "" and (not at or memory[at - 1])
        ]
        holes = [(_free_from(memory, at), at) for at in starts]
        fitting = [hole for hole in holes if hole[0] >= int(size)]
        if fitting:
            first = min(fitting)[1]
        elif memory and memory[-1] == "":
            first = max(holes, key=lambda hole: hole[1])[1]
        else:
            first = len(memory)
        memory[first : first + int(size)] = [name] * int(size)
    return len(memory)


def _free_from(memory: list[str], start: int) -> int:
    used = [at for at in range(start, len(memory)) if memory[at]]
    return (used[0] if used else len(memory)) - start


def _random(draw: st.DrawFn) -> tuple[Strategies, Stages]:
    ranks, chunks = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)]))
    stages = ranks * chunks
    dense = [float(draw(st.integers(0, 2))) for _ in range(stages)]
    moe = [float(draw(st.integers(1, 3))) for _ in range(stages)]
    strategy = Strategies(
        sequence=128.0,
        micro_batch=float(draw(st.integers(1, 3))),
        num_microbatches=float(ranks * draw(st.integers(1, 4))),
        tensor=float(draw(st.sampled_from([1, 2]))),
        pipeline=float(ranks),
        virtual_pipeline=float(chunks),
        data=8.0,
        expert=float(draw(st.sampled_from([1, 4]))),
        zero_stage=float(draw(st.integers(0, 3))),
        recompute_full=draw(st.sampled_from([0.0, 0.5, 1.0])),
        zero_bubble=float(draw(st.integers(0, 1))),
        expert_imbalance_p99=draw(st.sampled_from([1.0, 1.7])),
    )
    return strategy, _stages(dense, moe)


random_cases = st.lists(st.composite(_random)(), min_size=1, max_size=6)
MIXED = dataclasses.replace(
    QWEN3_30B, hidden=256.0, dense_ffn=512.0, dense_layers=2.0, experts=16.0, vocab=2048.0
)


def _joined(cases: list[tuple[Strategies, Stages]]) -> tuple[Strategies, Stages]:
    most = max(stages.dense_SC.shape[0] for _, stages in cases)
    names = ("dense_SC", "moe_SC", "embedding_SC", "head_SC", "mtp_SC")
    grids = {
        name: np.hstack(
            [
                np.pad(getattr(one, name), ((0, most - one.dense_SC.shape[0]), (0, 0)))
                for _, one in cases
            ]
        )
        for name in names
    }
    return stacked([strategy for strategy, _ in cases]), Stages(**grids)


@settings(deadline=None, max_examples=25)
@given(cases=random_cases)
def test_columns_of_different_pipelines_are_priced_independently(
    cases: list[tuple[Strategies, Stages]],
) -> None:
    strategies, stages = _joined(cases)
    constants = MemoryConstants(
        gathers_inputs=1.0,
        has_gather_buffer=1.0,
        receives_ahead=1.0,
        keeps_outputs=1.0,
        keeps_input_gradients=1.0,
        keeps_logits=1.0,
    )
    together = _price(MIXED, strategies, stages, constants)
    for column, (strategy, own) in enumerate(cases):
        isolated = _price(MIXED, strategy, own, constants)
        ranks = int(strategy.pipeline)
        for field in dataclasses.fields(MemoryPrice):
            actual = getattr(together, field.name)[:, column]
            assert np.allclose(actual[:ranks], getattr(isolated, field.name)[:, 0])
            assert not actual[ranks:].any()


@settings(deadline=None, max_examples=25)
@given(cases=random_cases)
def test_recompute_chunks_and_sharding_never_cost_memory_and_load_never_saves_any(
    cases: list[tuple[Strategies, Stages]],
) -> None:
    strategies, stages = _joined(cases)

    def total(**changes: Numbers) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        changed = dataclasses.replace(strategies, **changes)
        return _price(MIXED, changed, stages, NOTHING_ELSE).total_PC

    plain = total(recompute_full=0.0)
    slack = 1e-6 * plain
    assert (total(recompute_full=0.0, recompute_layernorm=1.0) <= plain + slack).all()
    assert (total(recompute_full=0.0, activation_offload=0.5) <= plain + slack).all()
    assert (total(recompute_full=0.0, optimizer_offload=1.0) <= plain + slack).all()
    assert (total(recompute_full=0.0, gradient_bytes=2.0) <= plain + slack).all()
    assert (total(recompute_full=0.0, expert_imbalance_p99=2.0) >= plain - slack).all()
    assert (total(recompute_full=1.0, chunks=4.0) <= total(recompute_full=1.0) + slack).all()


def test_units_are_shared_by_pipelines_of_any_depth() -> None:
    strategy = Strategies(sequence=128.0, micro_batch=1.0, num_microbatches=8.0, data=8.0)
    units = unit_bytes(MIXED, strategy, MACHINE, constants=MemoryConstants())
    for ranks in (1, 2, 4):
        deep = dataclasses.replace(strategy, pipeline=float(ranks))
        stages = _stages([0.0] * ranks, [2.0] * ranks)
        actual = assemble_memory(units, deep, stages)
        expected = _price(MIXED, deep, stages, MemoryConstants())
        assert np.array_equal(actual.total_PC, expected.total_PC)
        assert actual.total_PC.shape == (ranks, 1)
