import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rows import each_row
from tuner.engines.deepspeed import read as deepspeed
from tuner.engines.megatron_lm import read as megatron
from tuner.engines.reading.nearest import nearest_divisor, nearest_multiple
from tuner.engines.torchtitan import read as torchtitan
from tuner.errors import SpecError
from tuner.estimate.configuration import build_configuration, with_degrees
from tuner.estimate.decision import to_decision
from tuner.estimate.division import balanced
from tuner.estimate.estimate import estimate, pricing_setup
from tuner.estimate.legality import broken_rules
from tuner.estimate.prices import price_configurations
from tuner.estimate.registry import read_launch, read_text
from tuner.spec.spec import Spec

LAUNCHES = Path(__file__).parent / "launches"
MakeSpec = Callable[..., Spec]

LAUNCH = (
    "torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py --micro-batch-size 1 --seq-length 4096 "
    "--global-batch-size 256 --bf16 "
)
"""Of 64 devices, all of them data parallel until more is said."""


def refusal(flags: str, spec: Spec, *, launch: str = LAUNCH) -> str:
    """Return the one line that a launch is refused with."""
    settings = megatron.read(launch + flags, source="run.sh")
    try:
        configuration, _ = build_configuration(settings, spec)
    except SpecError as error:
        message = str(error)
    else:
        broken = next(broken_rules(configuration, spec.model, name=settings.name))
        message = f"{settings.source}: {broken}"
    assert "\n" not in message
    return message


def test_a_launch_replaces_the_knobs_of_the_spec_and_says_so(spec_of: MakeSpec) -> None:
    launch = megatron.read((LAUNCHES / "mixtral.sh").read_text(), source="mixtral.sh")
    own, notes = build_configuration(launch, spec_of("mixtral-8x7b", nodes=8))

    assert (own.devices, own.data, own.expert_data, own.num_microbatches) == (64, 16, 2, 16)
    assert [stage.layers for stage in own.stages] == [8, 8, 8, 8]
    assert (own.stages[0].embedding, own.stages[3].loss) == (True, True)
    assert not any("replaces" in note for note in notes)
    spec = spec_of("mixtral-8x7b", nodes=16, sequence_length=8192, global_batch_size=512)
    _, notes = build_configuration(launch, spec)

    assert "--seq-length 4096 replaces the spec's 8192" in notes
    assert "a global batch of 256 replaces the spec's 512" in notes
    assert "the launch uses 64 of the spec's 128 devices" in notes
    own, _ = build_configuration(launch, spec_of("mixtral-8x7b", nodes=8))
    other = with_degrees(own, tensor=2, pipeline=8)

    assert (other.data, other.sequence_parallel, len(other.stages)) == (4, True, 8)
    assert other.devices == own.devices


def test_ends_that_count_as_layers_divide_and_a_padded_vocabulary_is_a_note(
    spec_of: MakeSpec,
) -> None:
    launch = megatron.read_yaml((LAUNCHES / "llama.yaml").read_text(), source="llama.yaml")
    own, _ = build_configuration(launch, spec_of("llama-3.1-405b", nodes=128))

    # 128 with the ends, two for each of 64 stages.
    assert [stage.layers for stage in own.stages] == [1, *[2] * 62, 1]
    assert own.expert_tensor == 1
    launch = megatron.read(LAUNCH + "--vocab-size 31999", source="run.sh")
    _, notes = build_configuration(launch, spec_of("mixtral-8x7b", nodes=8))

    assert "--vocab-size 31999: priced with the model's vocabulary of 32000" in notes
    launch = deepspeed.read((LAUNCHES / "zero3.json").read_text(), source="ds.json")
    own, _ = build_configuration(launch, spec_of("llama-3.1-8b", nodes=8))

    assert (own.data, own.num_microbatches, own.zero_stage) == (64, 4, 3)


def test_torchtitan_gives_the_rest_to_earlier_stages_and_flushes_each_local_batch(
    spec_of: MakeSpec,
) -> None:
    launch = torchtitan.read((LAUNCHES / "deepseek-16b.toml").read_text(), source="d.toml")
    own, _ = build_configuration(launch, spec_of("deepseek-v2-lite", nodes=2))

    # 27 layers and both ends are 29: 8, 7, 7, 7, less one at either end.
    assert [stage.layers for stage in own.stages] == [7, 7, 7, 6]
    # 512 sequences over 8 replicas are 64, eight local batches of eight.
    assert (own.num_microbatches, own.rounds) == (8, 8)
    assert own.ranks_per_copy == 4


def test_launches_agree_with_the_devices_of_the_spec_or_are_refused(spec_of: MakeSpec) -> None:
    launch = megatron.read("--micro-batch-size 1 --global-batch-size 64", source="args")
    own, notes = build_configuration(launch, spec_of("llama-3.1-8b", nodes=2))

    assert own.data == 16
    assert "the launch leaves the number of devices open: the spec's 16 count" in notes
    message = refusal("", spec_of("llama-3.1-8b", nodes=4))

    assert "starts 64 processes, but the spec's cluster has 32 devices" in message
    launch = torchtitan.read("[parallelism]\ndata_parallel_shard_degree = 6", source="t.toml")
    with pytest.raises(SpecError, match="are 6 devices, not 16; the nearest is 16"):
        build_configuration(launch, spec_of("llama-3.1-8b", nodes=2))
    text = (
        '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, '
        '"gradient_accumulation_steps": 4}'
    )
    launch = deepspeed.read(text, source="ds.json")
    with pytest.raises(SpecError, match=r"= 128; write 128, or 2 micro-batches"):
        build_configuration(launch, spec_of("llama-3.1-8b", nodes=2))


def test_sequence_parallelism_without_tensor_parallelism_is_noted(spec_of: MakeSpec) -> None:
    launch = megatron.read(LAUNCH + "--sequence-parallel --tp-comm-overlap", source="run.sh")
    own, notes = build_configuration(launch, spec_of("llama-3.1-8b", nodes=8))

    assert (own.sequence_parallel, own.overlap_tensor) == (False, False)
    assert "--sequence-parallel has no effect: tensor parallelism is 1" in notes
    assert any("--tp-comm-overlap: tensor parallelism 1" in note for note in notes)


@each_row(
    ("model", "flags", "parts"),
    [
        (
            "llama-3.1-8b",
            "--tensor-model-parallel-size 3",
            ("64 devices are not divisible by", "nearest product that divides them is 2"),
        ),
        (
            "llama-3.1-8b",
            "--micro-batch-size 3",
            ("--global-batch-size 256 is not divisible by", "the nearest that is: 192"),
        ),
        (
            "llama-3.1-8b",
            "--pipeline-model-parallel-size 8 --global-batch-size 96 "
            "--num-virtual-stages-per-pipeline-rank 2",
            ("12 micro-batches do not fill groups of 8", "set --global-batch-size 128"),
        ),
        (
            "llama-3.1-8b",
            "--tensor-model-parallel-size 64 --sequence-parallel",
            ("does not divide the 32 attention heads", "the nearest that does is 32"),
        ),
        (
            "llama-3.1-8b",
            "--context-parallel-size 64 --seq-length 4160",
            ("--context-parallel-size 64 does not cut --seq-length 4160", "that does is 32"),
        ),
        (
            "llama-3.1-8b",
            "--expert-model-parallel-size 2",
            ("--expert-model-parallel-size 2: llama-3.1-8b has no experts; set it to 1",),
        ),
        (
            "mixtral-8x7b",
            "--expert-model-parallel-size 16",
            ("exceeds the 8 experts of mixtral-8x7b; the most is 8",),
        ),
        (
            "mixtral-8x7b",
            "--expert-model-parallel-size 3",
            ("does not divide the 8 experts", "the nearest that does is 2"),
        ),
        (
            "mixtral-8x7b",
            "--expert-model-parallel-size 8 --expert-tensor-parallel-size 16",
            ("does not divide the 64 devices of a pipeline stage", "degree that does is 4"),
        ),
        (
            "mixtral-8x7b",
            "--tensor-model-parallel-size 2",
            ("with experts needs --sequence-parallel; add it",),
        ),
        (
            "mixtral-8x7b",
            "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*8|t*8|t*8|t*8L "
            "--num-layers-per-virtual-pipeline-stage 4",
            (
                "--pipeline-model-parallel-layout and --num-layers-per-virtual-pipeline-stage",
                "keep one",
            ),
        ),
        (
            "mixtral-8x7b",
            "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*8|t*8|t*8|t*7L",
            ("holds 31 transformer layers, mixtral-8x7b has 32; place 32",),
        ),
        (
            "mixtral-8x7b",
            "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*8|t*8|t*16L",
            ("has 3 stages, not divisible by --pipeline-model-parallel-size 4", "number is 4"),
        ),
        (
            "mixtral-8x7b",
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3",
            ("does not cut 32 layers into stages", "the nearest that does is 2"),
        ),
        (
            "deepseek-v3",
            "--pipeline-model-parallel-size 4",
            ("61 layers (61 of deepseek-v3) are not divisible by 4 stages",),
        ),
        (
            "deepseek-v3",
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 14",
            ("leave 47 of 61 layers for 3 pipeline ranks",),
        ),
        (
            "mixtral-8x7b",
            "--num-virtual-stages-per-pipeline-rank 2",
            ("needs --pipeline-model-parallel-size above 1",),
        ),
        (
            "mixtral-8x7b",
            "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall",
            ("needs --expert-model-parallel-size above 1",),
        ),
        (
            "mixtral-8x7b",
            "--expert-model-parallel-size 8 --overlap-moe-expert-parallel-comm "
            "--moe-token-dispatcher-type alltoall --pipeline-model-parallel-size 4",
            ("needs more than one model chunk per rank",),
        ),
        (
            "mixtral-8x7b",
            "--expert-model-parallel-size 8 --overlap-moe-expert-parallel-comm "
            "--moe-token-dispatcher-type alltoall --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1",
            ("excludes --recompute-granularity full",),
        ),
        (
            "mixtral-8x7b",
            "--recompute-granularity selective --recompute-modules mla_up_proj",
            ("mla_up_proj: mixtral-8x7b has no latent attention",),
        ),
        (
            "mixtral-8x7b",
            "--overlap-param-gather --overlap-grad-reduce",
            ("--overlap-param-gather needs --use-distributed-optimizer",),
        ),
        (
            "mixtral-8x7b",
            "--mlp-chunks-for-training 4",
            ("saves memory only with --recompute-modules moe",),
        ),
        (
            "mixtral-8x7b",
            "--num-distributed-optimizer-instances 3",
            ("3 copies of sharded state do not divide data parallelism 64",),
        ),
        (
            "mixtral-8x7b",
            "--num-layers 61",
            ("--num-layers 61, but mixtral-8x7b of the spec has num_layers 32",),
        ),
        (
            "mixtral-8x7b",
            "--vocab-size 128256",
            ("--vocab-size 128256, but mixtral-8x7b of the spec has vocab_size 32000",),
        ),
        (
            "deepseek-v3",
            "--num-layers 61 --num-experts 256 --multi-latent-attention",
            ("--moe-layer-freq 1, but deepseek-v3 of the spec has moe_layers ([0]*3+[1]*58)",),
        ),
        (
            "llama-3.1-8b",
            "--num-layers 32 --num-attention-heads 32",
            ("no --group-query-attention, but llama-3.1-8b of the spec has num_kv_heads 8",),
        ),
    ],
)
def test_refuses_with_value_rule_and_nearest_legal_value(
    spec_of: MakeSpec, model: str, flags: str, parts: tuple[str, ...]
) -> None:
    message = refusal(flags, spec_of(model, nodes=8))

    assert message.startswith("run.sh: ")
    assert all(part in message for part in parts), message


def test_uneven_layers_leave_the_ends_the_smaller_share() -> None:
    assert [stage.layers for stage in balanced(61, 4)] == [15, 16, 15, 15]
    assert [stage.layers for stage in balanced(63, 4)] == [16, 16, 16, 15]
    assert (nearest_multiple(1, 8), nearest_multiple(13, 8)) == (8, 16)


@each_row(
    ("whole", "wanted", "expected"), [(64, 3, 2), (64, 100, 64), (7, 4, 1), (1, 5, 1), (12, 5, 4)]
)
def test_the_nearest_divisor(whole: int, wanted: int, expected: int) -> None:
    assert nearest_divisor(whole, wanted) == expected


# Copies of the sharded state (HSDP, MiCS) and orders of ranks reach the decision of a launch.

HSDP = """
[training]
local_batch_size = 4
seq_len = 4096
[parallelism]
data_parallel_replicate_degree = {copies}
data_parallel_shard_degree = {shard}
"""
MEGATRON = (
    "torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py --pipeline-model-parallel-size 2"
    " --expert-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 256 --bf16"
    " --seq-length 4096 --use-distributed-optimizer --moe-token-dispatcher-type alltoall"
    " --hidden-dropout 0 --attention-dropout 0 "
)


def test_copies_of_hsdp_reach_the_decision_and_the_price(spec_of: Callable[..., Spec]) -> None:
    spec = spec_of("llama-3.1-8b", nodes=4)
    steps = {}
    for copies in (1, 4):
        text = HSDP.format(copies=copies, shard=32 // copies)
        launch = read_text(text, format_name="torchtitan", source="hsdp.toml")
        own, _ = build_configuration(launch, spec)
        decision = to_decision(own, spec.model)
        assert decision.num_state_copies == copies
        assert decision.shard_ranks == (None if copies == 1 else 8)
        (price,) = price_configurations((own,), pricing_setup(spec, None))
        steps[copies] = price.peak_bytes_P.max()
    # Four copies of the state take more memory than one.
    assert steps[4] > steps[1]


def test_mics_is_held_against_the_manifest(tmp_path: Path, spec_of: Callable[..., Spec]) -> None:
    path = tmp_path / "ds.json"
    settings = {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "mics_shard_size": 8},
    }
    path.write_text(json.dumps(settings))
    result = estimate(spec_of("llama-3.1-8b", nodes=4), read_launch(str(path)))
    assert result.decision.shard_ranks == 8
    assert any("shard_ranks" in refusal for refusal in result.refused_by)


def test_megatrons_copies_and_order_of_ranks_are_read(spec_of: Callable[..., Spec]) -> None:
    spec = spec_of("qwen3-30b-a3b", nodes=4)
    result = {}
    for more, copies, order in (
        ("", 1, "tp-cp-ep-dp-pp"),
        ("--num-distributed-optimizer-instances 4", 4, "tp-cp-ep-dp-pp"),
        ("--use-tp-pp-dp-mapping", 1, "tp-cp-ep-pp-dp"),
    ):
        own, _ = build_configuration(read_launch(MEGATRON + more), spec)
        decision = to_decision(own, spec.model)
        assert (decision.num_state_copies, decision.rank_order) == (copies, order), more
        (price,) = price_configurations((own,), pricing_setup(spec, None))
        result[more] = price.step_s
    # With pipeline ranks inside, data-parallel groups span servers: the order has a price.
    assert len(set(result.values())) == 3


def test_block_recomputation_counts_the_layers_of_every_model_chunk(
    spec_of: Callable[..., Spec],
) -> None:
    # 48 layers, PP 2, two model chunks a rank: 12 layers each, of which 3 are recomputed.
    more = (
        "--num-virtual-stages-per-pipeline-rank 2 --recompute-granularity full"
        " --recompute-method block --recompute-num-layers 3"
    )
    spec = spec_of("qwen3-30b-a3b", nodes=4)
    own, _ = build_configuration(read_launch(MEGATRON + more), spec)
    assert own.recompute_ratio == 0.25
    assert to_decision(own, spec.model).recompute_num_layers == 3
