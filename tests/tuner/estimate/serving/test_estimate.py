"""Launches of serving engines under a spec's traffic: what they do, and what would beat them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.expect import present
from tests.rows import each_row
from tuner import api
from tuner.costs.serve.cache_capacity import visible_bytes
from tuner.errors import SpecError
from tuner.estimate.serving.estimate import pool_named
from tuner.estimate.serving.records import ServingEstimate
from tuner.spec.cluster import Pool

Made = Callable[..., Any]
START = "vllm serve m"


def test_latency_memory_and_cache_are_predicted(deployment: Made) -> None:
    result = deployment().predict(f"{START} -tp 4 --max-num-seqs 64 --seed 1")
    assert result.fits
    assert result.load.keeps_up
    assert result.load.devices == result.instance.devices == 4
    assert 0.0 < result.load.tpot_s.mean < result.load.ttft_s.mean
    low, high = result.ttft_s_band
    assert low < result.load.ttft_s.mean < high
    assert result.load.requests_per_s == pytest.approx(5.0)
    assert result.load.requests_per_s <= result.load.capacity_per_s
    assert result.flags_ignored == ("--seed 1",)
    # Mixtral has 46.7e9 parameters: in bf16 on 4 devices 23.4e9 bytes each.
    assert result.memory.weight_bytes == pytest.approx(46.7e9 * 2 / 4, rel=0.01)
    # Of one token 32 layers x 8 heads x 128 x 2 of 2 bytes, a quarter on each of 4 devices.
    assert result.memory.cache_bytes == pytest.approx(result.kv_tokens * 131072 / 4, rel=1e-3)
    # vLLM takes 0.92 of what CUDA shows; context and communicators, 2.25 GiB, are not part of it.
    assert result.memory.limit_ratio == 0.92
    used = result.memory.weight_bytes + result.memory.cache_bytes + result.memory.reserve_bytes
    limit = 0.92 * visible_bytes(result.memory.device_bytes) + 2.25 * 2**30
    assert used == pytest.approx(limit, rel=1e-6)


def test_the_share_of_memory_counts_and_the_same_launch_has_the_same_answer(
    deployment: Made,
) -> None:
    made = deployment()
    less = made.predict(f"{START} -tp 4 --gpu-memory-utilization 0.5")
    more = made.predict(f"{START} -tp 4 --gpu-memory-utilization 0.95")
    # 45 % of what CUDA shows of 80 GiB on each of 4 devices, 131072 bytes a token over all of them.
    each = visible_bytes(more.memory.device_bytes) * 0.45 / (131072 / 4)
    assert more.kv_tokens - less.kv_tokens == pytest.approx(each, rel=1e-3)
    assert made.estimate(f"{START} -tp 4") == made.estimate(f"{START} -tp 4")


def test_a_stated_cache_counts_whatever_the_share_and_must_fit_beside_the_steps(
    deployment: Made,
) -> None:
    made, stated = deployment(), f"{START} -tp 4 --kv-cache-memory-bytes"
    result = made.predict(f"{stated} 20G --gpu-memory-utilization 0.5")
    assert result.fits
    assert result.memory.cache_bytes == pytest.approx(20 * 2**30, rel=1e-6)
    tight = made.predict(f"{stated} 79G")
    assert not tight.fits
    assert "give the engine a smaller cache" in tight.misfit
    assert "has no room for a request" in made.predict(f"{stated} 1M").misfit


def test_weights_that_leave_no_room_do_not_fit_and_a_change_makes_them(deployment: Made) -> None:
    result = deployment().estimate(f"{START} --max-num-seqs 64")
    assert not result.fits
    assert result.load is None
    assert result.kv_tokens == 0
    assert result.instances_needed == 0
    assert result.smallest_change.instance.devices == 2
    assert "--" in result.smallest_change.lines[0]


def test_a_model_far_too_large_gets_a_degree_that_fits(deployment: Made) -> None:
    result = deployment(model="deepseek-v3", device="h200-sxm", extra="quantization: fp8_block")
    assert present(result.estimate(f"{START} -tp 2").smallest_change).instance.devices == 8
    nowhere = deployment(model="deepseek-v3", nodes=1, extra="quantization: bf16")
    assert nowhere.estimate(f"{START} -tp 8").changes == ()


def test_a_launch_that_falls_behind_says_how_many_would_do(deployment: Made) -> None:
    made = deployment(traffic="{rate: 30/s, input_tokens: 2000, output_tokens: 300}")
    one = made.predict(f"{START} -tp 4 --max-num-seqs 64")
    assert not one.load.keeps_up
    assert one.load.requests_per_s < 30.0
    needed = one.instances_needed
    assert 1 < needed <= 4
    enough = made.predict(f"{START} -tp 4 --max-num-seqs 64", instances=needed)
    assert enough.load.keeps_up
    assert enough.load.devices == 4 * needed
    assert enough.load.ttft_s.mean < one.load.ttft_s.mean


def test_copies_behind_one_command_share_the_traffic(deployment: Made) -> None:
    result = deployment(model="llama-3.1-8b").predict(f"{START} -dp 4 --max-num-seqs 64")
    assert result.instance.count == 4
    assert result.load.devices == 4


def test_the_best_change_of_one_thing_is_itself_predicted_so(deployment: Made) -> None:
    made = deployment()
    result = made.estimate(f"{START} -tp 8 --max-num-seqs 64")
    best = present(result.smallest_change)
    assert best.beats
    assert best.gain_ratio >= -result.least_gain_ratio
    flags = [line for line in best.lines if not line.startswith("without")]
    command = f"{START} --max-num-seqs 64 {'' if '--tensor' in best.lines[0] else '-tp 8'}"
    again = made.estimate(f"{command} {' '.join(flags)}")
    assert again.instance == best.instance
    assert again.load == best.load


def test_ratios_to_the_launch_have_bands_where_the_degrees_alone_differ(deployment: Made) -> None:
    result = deployment().estimate(f"{START} -tp 4 --max-num-seqs 64")
    moved = [change for change in result.changes if change.tpot_ratio_band is not None]
    assert any(change.what.startswith("TP") for change in moved)
    for change in moved:
        assert not change.what.startswith(("batch", "step", "all-to-all"))
        low, high = change.tpot_ratio_band
        assert low < change.load.tpot_s.mean / result.load.tpot_s.mean < high
        first = result.ttft_s_band
        low, high = change.ttft_ratio_band
        assert high / low < first[1] / first[0]
    assert len(moved) < len(result.changes)


@each_row(("model", "is_new"), (("mixtral-8x7b", True), ("llama-3.1-70b", False)))
def test_a_pair_without_calibration_rows_is_said_to_be_new(
    *, deployment: Made, model: str, is_new: bool
) -> None:
    text = "no published run of this model on vllm"
    result = deployment(model=model).predict(f"{START} -tp 8 --max-num-seqs 64")
    assert result.is_new_pair is is_new
    assert any(note.startswith(text) for note in result.notes) is is_new


def test_a_change_keeps_precision_and_is_launchable(deployment: Made) -> None:
    result = deployment(engine="sglang").estimate(
        "sglang serve m --tp 8 --quantization fp8 --kv-cache-dtype fp8_e4m3"
    )
    assert (result.quantization, result.kv_cache_dtype) == ("fp8", "fp8")
    assert any("the launch's fp8 count" in note for note in result.notes)
    assert result.num_tried == len(result.changes) > 3
    assert len({change.what for change in result.changes}) == len(result.changes)
    missed = [len(change.load.missed) + (not change.load.keeps_up) for change in result.changes]
    assert missed == sorted(missed)


def test_a_model_without_experts_has_none_to_split(deployment: Made) -> None:
    result = deployment(model="llama-3.1-70b").estimate(f"{START} -tp 4 --max-num-seqs 32")
    assert {change.instance.devices for change in result.changes} >= {4, 8}
    for change in result.changes:
        assert change.what.startswith(("TP", "batch", "step"))
        assert (change.instance.ep, change.instance.attention_dp) == (1, 1)


def test_fewer_devices_win_where_targets_hold_and_more_where_they_are_missed(
    deployment: Made,
) -> None:
    result = deployment(
        traffic="{rate: 0.2/s, input_tokens: 500, output_tokens: 100}",
        slo="{ttft: {p90: 5s}, tpot: {p90: 200ms}}",
    ).estimate(f"{START} -tp 8")
    assert result.smallest_change.instance.devices == 4
    assert result.smallest_change.gain_ratio == pytest.approx(1.0, rel=0.05)
    made = deployment(slo="{ttft: {p90: 1s}, tpot: {p90: 20ms}}")
    result = made.estimate(f"{START} -tp 2 --max-num-seqs 64")
    assert "tpot p90" in result.load.missed
    assert not result.smallest_change.load.missed


@each_row("role", ["prefill", "decode"])
@each_row("load", ["rate: 5/s", "concurrency: 64"])
def test_a_prefill_or_decode_launch_gets_only_its_latency(
    deployment: Made, role: str, load: str
) -> None:
    made = deployment(
        engine="sglang", traffic=f"{{{load}, input_tokens: 2000, output_tokens: 300}}"
    )
    result = made.estimate(f"sglang serve m --tp 8 --disaggregation-mode {role}")
    assert (result.load.ttft_s is None) == (role == "decode")
    assert (result.load.tpot_s is None) == (role == "prefill")
    assert any("other half" in note for note in result.notes)
    assert any("closed loop of 64" in note for note in result.notes) == ("conc" in load)
    if role == "prefill":
        assert not any("batch" in change.what for change in result.changes)


def test_a_closed_loop_always_keeps_up(deployment: Made) -> None:
    made = deployment(traffic="{concurrency: 32, input_tokens: 2000, output_tokens: 300}", slo="{}")
    result = made.predict(f"{START} -tp 4 --max-num-seqs 64")
    assert result.load.keeps_up
    # Little's law: requests under way are rate x time of one.
    seconds = result.load.ttft_s.mean + 299 * result.load.tpot_s.mean
    assert result.load.requests_per_s * seconds == pytest.approx(32, rel=0.1)


def test_what_counts_otherwise_than_stated_is_said(deployment: Made) -> None:
    result = deployment().predict(f"{START} -tp 4 --max-num-seqs 4096")
    assert result.instance.max_batch == 1024
    assert any("not 4096" in note for note in result.notes)
    result = deployment(engine="sglang").predict(f"{START} -tp 4")
    assert result.engine == "vllm"
    assert any("the launch's vllm counts" in note for note in result.notes)
    result = deployment(model="deepseek-v3", nodes=4, extra="quantization: fp8_block").predict(
        f"{START} -dp 32 -ep --all2all-backend deepep_low_latency"
        " --max-num-batched-tokens 8192 --max-num-seqs 64"
    )
    assert any("1024 tokens per rank and step at most" in line for line in result.refused_by)
    with pytest.raises(SpecError, match="take 32 devices, pool 'gpus' has 16; the nearest is 2"):
        deployment().predict(f"{START} -tp 8", instances=4)


def test_a_small_step_budget_lengthens_the_time_to_the_first_token(deployment: Made) -> None:
    traffic = "{rate: 1/s, input_tokens: 8000, output_tokens: 100}"
    small, large = (
        deployment(traffic=traffic).predict(
            f"{START} -tp 4 --max-num-seqs 64 --max-num-batched-tokens {tokens}"
        )
        for tokens in (512, 8192)
    )
    assert small.instance.max_batched_tokens == 512
    assert small.load.ttft_s.p50 > 1.2 * large.load.ttft_s.p50


def test_one_of_several_pools_is_named(deployment: Made) -> None:
    spec = deployment().spec
    pools = tuple(
        Pool(name=name, device="h100-sxm", nodes=1, devices_per_node=8) for name in ("a", "b")
    )
    spec = replace(spec, cluster=spec.cluster.model_copy(update={"pools": pools}))
    assert pool_named(spec, "b") is pools[1]
    with pytest.raises(SpecError, match="has 2 pools; name one with --pool: a, b"):
        pool_named(spec, None)
    with pytest.raises(SpecError, match="'c' is none of a, b"):
        pool_named(spec, "c")


V3 = {"model": "deepseek-v3", "device": "h200-sxm", "engine": "sglang"}
SGLANG = "python -m sglang.launch_server --model-path m --tp-size 8 --max-running-requests 256"
DRAFTS = "--speculative-algorithm EAGLE --speculative-num-steps 2"
KEPT = "speculative: {draft_tokens: 2, acceptance: 0.85}\n  quantization: fp8_block"


def test_drafts_are_priced_where_the_spec_says_how_many_are_kept(deployment: Made) -> None:
    plain = deployment(**V3, extra=KEPT).estimate(SGLANG)
    drafted = deployment(**V3, extra=KEPT).estimate(f"{SGLANG} {DRAFTS}")
    unsaid = deployment(**V3, extra="quantization: fp8_block").predict(f"{SGLANG} {DRAFTS}")
    assert drafted.instance.draft_tokens == 2
    assert mean_tpot_s(drafted) < 0.8 * mean_tpot_s(plain)
    assert mean_tpot_s(unsaid) == pytest.approx(mean_tpot_s(plain))
    assert any("2 drafted tokens a step have no price" in note for note in unsaid.notes)
    (without,) = (change for change in drafted.changes if change.what == "drafts 2 -> 0")
    assert "without --speculative-num-steps" in without.lines
    (with_them,) = (change for change in plain.changes if change.what == "drafts 0 -> 2")
    assert "--speculative-algorithm NEXTN" in with_them.lines


def test_all_to_all_backends_and_two_batch_overlap_are_priced(deployment: Made) -> None:
    made = deployment(**V3, extra="quantization: fp8_block")
    start = f"{SGLANG} --attn-dp-size 8 --moe-a2a-backend deepep"
    gathered = made.estimate(f"{SGLANG} --attn-dp-size 8 --ep-size 8")
    dispatched, halved = made.estimate(start), made.predict(f"{start} --enable-two-batch-overlap")
    assert halved.instance.two_batch_overlap
    assert "--enable-two-batch-overlap" in halved.flags_understood
    assert len({mean_tpot_s(one) for one in (gathered, dispatched, halved)}) == 3
    assert "with two-batch overlap" in {one.what for one in dispatched.changes}
    assert "all-to-all allgather -> deepep_low_latency" in {one.what for one in gathered.changes}


def test_a_pipeline_is_priced(deployment: Made) -> None:
    made = deployment(model="llama-3.1-70b", extra="quantization: fp8")
    piped = made.predict(f"{START} -tp 2 -pp 2 --max-num-seqs 64")
    plain = made.predict(f"{START} -tp 2 --max-num-seqs 64")
    assert (piped.instance.pp, piped.instance.devices) == (2, 4)
    assert piped.memory.weight_bytes == pytest.approx(0.5 * plain.memory.weight_bytes, rel=0.05)
    assert piped.kv_tokens > 2 * plain.kv_tokens


REPEATED = "{rate: 1/s, input_tokens: 8000, output_tokens: 100, prefix_hit: 0.8}"


def test_a_launch_without_a_prefix_cache_computes_every_prompt(deployment: Made) -> None:
    cached = deployment(traffic=REPEATED).predict(f"{START} -tp 4")
    whole = deployment(traffic=REPEATED).predict(f"{START} -tp 4 --no-enable-prefix-caching")
    assert cached.load.ttft_s.p50 < 0.6 * whole.load.ttft_s.p50
    assert any("has no prefix cache" in note for note in whole.notes)


def test_a_session_finds_its_prefix_on_one_rank_unless_the_router_reaches_it(
    deployment: Made,
) -> None:
    traffic = "{rate: 1/s, input_tokens: 8000, output_tokens: 100, prefix_hit: 0.8SCOPE}"
    session, common = (traffic.replace("SCOPE", s) for s in ("", ", prefix_scope: common"))
    start = f"{START} -dp 4 --enable-expert-parallel"
    router = f"{start} &\nvllm-router --worker-urls http://a:8000"
    to_ranks = f"{router} --intra-node-data-parallel-size 4"
    found = {}
    for name, stated, command in (
        ("inside", session, start),
        ("instances", session, router),
        ("ranks", session, to_ranks),
        ("common", common, start),
        ("too few", session, to_ranks.replace("size 4", "size 2")),
    ):
        result = deployment(traffic=stated).predict(command)
        notes = [note for note in result.notes if "counted on in prefix caches" in note]
        found[name] = present(present(result.load).ttft_s).mean, notes
    for name in ("inside", "instances", "too few"):
        mean_s, (note,) = found[name]
        assert note.startswith("20.0 % of the prompt tokens"), name
        assert mean_s > 1.5 * found["ranks"][0], name
    for name in ("ranks", "common"):
        assert not found[name][1], name
    assert found["ranks"][0] == pytest.approx(found["common"][0])


def test_tensorrt_llm_finds_prefixes_on_its_ranks_where_it_is_told_to(deployment: Made) -> None:
    made = deployment(engine="trtllm", traffic=REPEATED)
    start = "trtllm-serve serve m --tp_size 4 --ep_size 4 --enable_attention_dp"
    plain, told = (
        made.predict(f"{start} --attention-dp-config.{option}")
        for option in ("enable-balance", "enable-kv-cache-aware-routing")
    )
    assert any("20.0 % of the prompt tokens" in note for note in plain.notes)
    assert not any("counted on in prefix caches" in note for note in told.notes)
    assert present(present(plain.load).ttft_s).mean > 1.5 * present(present(told.load).ttft_s).mean


def test_pages_are_read(deployment: Made) -> None:
    assert deployment().predict(f"{START} -tp 4 --block-size 32").instance.page_size == 32


def mean_tpot_s(result: ServingEstimate) -> float:
    return present(present(result.load).tpot_s).mean


PREFILL = (
    "python -m sglang.launch_server --model-path m --disaggregation-mode prefill --tp-size 32"
    " --dp-size 32 --enable-dp-attention --moe-a2a-backend deepep --deepep-mode normal"
    " --chunked-prefill-size 524288 --max-total-tokens 131072 --context-length 8192"
    " --mem-fraction-static 0.85"
)
DECODE = (
    "python -m sglang.launch_server --model-path m --disaggregation-mode decode --tp-size 64"
    " --dp-size 64 --enable-dp-attention --moe-a2a-backend deepep --deepep-mode low_latency"
    " --cuda-graph-bs 256 --max-running-requests 18432 --context-length 4500"
)


def deepseek(deployment: Made) -> Any:
    return deployment(
        model="deepseek-v3",
        engine="sglang",
        nodes=9,
        traffic="{concurrency: 1024, input_tokens: 2000, output_tokens: 500}",
        slo="{ttft: {p90: 10s}, tpot: {p90: 100ms}}",
        extra="quantization: fp8_block",
    )


def test_wide_launches_have_the_cache_that_they_cap_or_leave(deployment: Made) -> None:
    made = deepseek(deployment)
    for running in (256, 8192):
        result = made.predict(f"{PREFILL} --max-running-requests {running}")
        assert result.fits, running
        assert result.kv_tokens == 32 * 131_072
        used = result.memory.weight_bytes + result.memory.cache_bytes + result.memory.reserve_bytes
        assert used < result.memory.device_bytes
    less, more = (made.predict(f"{DECODE} --mem-fraction-static {x}") for x in (0.835, 0.9))
    # 0.835 x 76.9 GiB that are free, less 29 of weights (4 of 256 experts, all of attention).
    assert less.memory.cache_bytes == pytest.approx(35.1 * 2**30, rel=0.02)
    grown = more.memory.cache_bytes - less.memory.cache_bytes
    assert grown == pytest.approx(0.065 * 76.9 * 2**30, rel=0.01)
    used = more.memory.weight_bytes + more.memory.cache_bytes + more.memory.reserve_bytes
    assert used < more.memory.device_bytes


def test_windowed_layers_count_once_and_one_request_must_have_room(deployment: Made) -> None:
    made = deployment(model="gpt-oss-120b", extra="quantization: mxfp4")
    result = made.predict("vllm serve openai/gpt-oss-120b --tensor-parallel-size 2")
    assert result.fits
    used = result.memory.weight_bytes + result.memory.cache_bytes + result.memory.reserve_bytes
    assert used < result.memory.device_bytes
    # In the log's words every request is of 131,072 tokens, of which windows keep 127 and the
    # 16,384 in flight: 1,034 blocks beside 8,192. A running one of 2,300 takes 9 beside 144.
    shares = (8192 / (8192 + 1034)) / (144 / (144 + 9))
    assert result.logged_kv_tokens / result.kv_tokens == pytest.approx(shares, rel=0.01)
    whole = made.predict("vllm serve openai/gpt-oss-120b")
    assert not whole.fits
    assert "wants room for one request of 131072 tokens" in whole.misfit
    assert made.predict("vllm serve openai/gpt-oss-120b --max-model-len 16384").fits


def test_steps_that_a_share_leaves_too_little_do_not_fit(deployment: Made) -> None:
    tight = deployment(engine="sglang").predict(
        "python -m sglang.launch_server --model-path m --tp 4 --mem-fraction-static 0.98"
        " --chunked-prefill-size 65536"
    )
    assert not tight.fits
    assert tight.load is None
    assert "too little for activations, CUDA graphs and buffers" in tight.misfit


def test_changes_of_a_pipeline_keep_its_devices(deployment: Made) -> None:
    result = deployment().estimate("vllm serve m -tp 4 -pp 2 -ep --max-model-len 8192")
    assert all(change.instance.devices >= 2 for change in result.changes)


def test_a_launch_on_a_device_that_the_spec_describes_is_estimated(deployment: Made) -> None:
    sheet = (
        "{name: mychip, generation: hopper, compute_units: 132, flop_per_s: {bf16: 989e12},"
        " memory_bytes: 80GiB, memory_bytes_per_s: 3.35TB/s, scale_up_bytes_per_s: 450GB/s,"
        " scale_out_bytes_per_s: 400Gbit/s, host_bytes_per_s: 64GB/s}"
    )
    assert deployment(device=sheet).predict(f"{START} -tp 4").fits


# Says of a launch that serves under a spec that trains, and of the reverse, what to change.

MODELS = Path(__file__).parents[4] / "examples" / "models"
HEAD = f"""
schema_version: 1
model: {MODELS / "mixtral-8x7b"}
cluster:
  pools: [{{name: pool, device: h100-sxm, nodes: 1, devices_per_node: 8}}]
"""
TRAIN = f"{HEAD}goal: {{kind: train, global_batch_size: 256, sequence_length: 4096}}\n"
SERVE = f"""{HEAD}goal:
  kind: serve
  engine: {{name: vllm}}
  traffic: {{concurrency: 8, input_tokens: 1000, output_tokens: 100}}
"""


def test_a_server_under_a_spec_that_trains_is_named(tmp_path: Path) -> None:
    spec, compose = tmp_path / "spec.yaml", tmp_path / "compose.yaml"
    spec.write_text(TRAIN)
    compose.write_text("services: {s: {image: 'vllm/vllm-openai:v1', command: [m, -tp, 8]}}\n")
    for launch, engine in (
        ("vllm serve m --tensor-parallel-size 8", "vllm"),
        ("docker run --gpus all vllm/vllm-openai:v1 --model m -tp 8", "vllm"),
        ("python -m sglang.launch_server --model m --tp 8", "sglang"),
        ("trtllm-serve serve m --tp_size 8", "trtllm"),
        (str(compose), "vllm"),
    ):
        with pytest.raises(SpecError, match=f"serves, by {engine}, the spec trains; give"):
            api.estimate(spec, launch=launch)
    with pytest.raises(SpecError, match="no program"):
        api.estimate(spec, launch="python train.py")


def test_a_training_run_under_a_spec_that_serves_is_named(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SERVE)
    for launch in (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8",
        "NPROC_PER_NODE=8 megatron sft --model m",
        "torchrun -m torchtitan.train",
        "deepspeed train.py --deepspeed ds.json",
    ):
        with pytest.raises(SpecError, match="trains, the spec serves; give a spec with goal"):
            api.estimate_serving(spec, launch=launch)
    with pytest.raises(SpecError, match="no server"):
        api.estimate_serving(spec, launch="python other.py")
