"""Whole steps: plain sums, drafting, halves and pipelines, on a datasheet alone."""

from dataclasses import replace

import numpy as np
import pytest

from tests.rows import each_row
from tests.tuner.decoders import DEEPSEEK_V3, GLM_5, LLAMA_70B, QWEN35_397B
from tuner.costs.serve.decoder import Decoder, Formats
from tuner.costs.serve.engine import A2aBackend, InstanceDegrees
from tuner.costs.serve.expert_loads import ExpertLoads
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.speculative import Drafting, DraftMethod
from tuner.costs.serve.whole_step import draft_s, halves_s, prompt_step_s, step_s
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import HostTimes, ServingMachine

FP8 = Formats(
    attention="fp8_block", output="fp8_block", ffn="fp8_block", experts="fp8_block", kv="fp8"
)
N = np.array([1.0, 4.0, 32.0, 128.0, 512.0])
PAST = np.full_like(N, 2000.0)
HOST = HostTimes(step_s=1e-3, tensor_step_s=0.0, sequence_s=0.0, request_s=0.0)


def iteration(decoder: Decoder, **named: int) -> Iteration:
    return Iteration(
        decoder=decoder,
        formats=FP8,
        degrees=InstanceDegrees(**named),
        traits=ENGINE_TRAITS["sglang"],
        machine=ServingMachine(engines=ENGINE_TRAITS, sheet=find_device("h200-sxm"), tables=None),
    )


TENSOR = iteration(LLAMA_70B, attention_tensor=8)
DATA = iteration(DEEPSEEK_V3, attention_data=16, expert=16)


def test_a_plain_step_is_the_sum_of_its_parts() -> None:
    for one in (TENSOR, DATA):
        parts = one.linear_s(N) + one.head_s(N) + one.decode_s(N, PAST) + one.scheduler_s
        assert step_s(one, N, PAST) == pytest.approx(parts)
        assert one.tokens_per_step == 1.0


@each_row("method", list(DraftMethod))
def test_drafts_pay_for_few_sequences_and_not_where_none_is_kept(method: DraftMethod) -> None:
    good, useless = (
        replace(DATA, drafting=Drafting(draft_tokens=2, acceptance=acceptance, method=method))
        for acceptance in (0.8, 0.0)
    )
    plain = step_s(DATA, N, PAST)
    assert float(step_s(good, N, PAST)[0]) / good.tokens_per_step < float(plain[0])
    # A step itself always takes longer: it checks three tokens for one.
    assert useless.tokens_per_step == 1.0
    assert (step_s(useless, N, PAST) > plain).all()
    assert (step_s(good, N, PAST) > plain).all()


def test_every_further_draft_takes_one_pass_more() -> None:
    passes = [
        draft_s(replace(DATA, drafting=Drafting(draft_tokens=k, acceptance=0.5)), N[:1], PAST[:1])
        for k in (1, 2, 3, 4)
    ]
    steps = np.diff(np.concatenate(passes))
    assert (steps > 0.0).all()
    # One sequence: what the first pass reads hardly counts beside its weights.
    assert steps == pytest.approx(np.full(3, steps[0]), rel=0.2)


@each_row("decoder", [LLAMA_70B, DEEPSEEK_V3, GLM_5, QWEN35_397B])
def test_checking_drafts_reads_the_past_once(decoder: Decoder) -> None:
    one = iteration(decoder, attention_tensor=8, expert=8)
    checked = replace(one, drafting=Drafting(draft_tokens=3, acceptance=0.5))
    plain_s, drafted_s = one.decode_s(N, PAST), checked.decode_s(N, PAST)
    assert (drafted_s >= plain_s).all()
    assert (drafted_s <= 4.0 * plain_s * (1.0 + 1e-9)).all()
    if decoder is LLAMA_70B:
        # Eight query heads to a key head: still bound by the reading of keys.
        assert drafted_s[-1] == pytest.approx(plain_s[-1], rel=0.05)


def test_halves_hide_exchange_behind_products_for_many_tokens() -> None:
    plain = replace(DATA, a2a_backend=A2aBackend.LOW_LATENCY)
    gain = step_s(plain, N, PAST) / step_s(replace(plain, two_batch_overlap=True), N, PAST)
    # One sequence cannot be halved; few lose by two small halves; many gain.
    assert gain[0] == pytest.approx(1.0)
    assert gain[1] < 1.0
    assert gain[-1] > 1.0


def test_halves_never_take_less_than_what_they_compute_or_exchange() -> None:
    halved = replace(DATA, two_batch_overlap=True, a2a_backend=A2aBackend.NORMAL)
    parts = halves_s(halved, N)
    attention_s = 2.0 * halved.decode_s(N[1:] / 2.0, PAST[1:])
    whole_s = step_s(halved, N, PAST)[1:]
    assert (whole_s >= parts["open"][1:] + attention_s - 1e-12).all()
    assert (whole_s >= parts["hidden"][1:]).all()
    # Normal kernels hold multiprocessors meanwhile, whatever hides them.
    assert (parts["held"][1:] > 0.0).all()


def test_without_data_parallel_exchange_there_is_nothing_to_halve() -> None:
    halved = replace(iteration(DEEPSEEK_V3, attention_tensor=8, expert=8), two_batch_overlap=True)
    plain = replace(halved, two_batch_overlap=False)
    m = np.array([64.0])
    assert halves_s(halved, m)["open"] == pytest.approx(plain.linear_s(m))
    assert halves_s(halved, m)["hidden"] == pytest.approx([0.0])


def test_a_pipeline_is_as_long_as_its_layers_for_one_sequence() -> None:
    alone, staged = iteration(LLAMA_70B), iteration(LLAMA_70B, pipeline=4)
    one, past = np.ones(1), np.array([1000.0])
    # All layers one after the other, and three KV transfers.
    expected_s = step_s(alone, one, past) + staged.passed_s(one)
    assert step_s(staged, one, past) == pytest.approx(expected_s)
    assert float(staged.passed_s(one)[0]) > 0.0


def test_a_full_pipeline_steps_micro_batches_in_turn() -> None:
    alone, staged = iteration(LLAMA_70B), iteration(LLAMA_70B, pipeline=4)
    many, past = np.array([256.0]), np.array([1000.0])
    quarter_s = step_s(alone, many / 4.0, past)
    # The slowest stage has the head beside a quarter of the layers.
    slowest_s = (quarter_s - alone.head_s(many / 4.0) - alone.scheduler_s) / 4.0
    slowest_s = slowest_s + alone.head_s(many / 4.0)
    expected_s = np.maximum(quarter_s, 4.0 * slowest_s) + staged.passed_s(many / 4.0)
    assert step_s(staged, many, past) == pytest.approx(expected_s)


def test_a_prompt_in_two_steps_attends_to_what_was_read() -> None:
    half, none = np.array([2048.0]), np.zeros(1)
    first_s, second_s = prompt_step_s(TENSOR, half, none), prompt_step_s(TENSOR, half, half)
    whole_s = prompt_step_s(TENSOR, 2.0 * half, none)
    assert float(first_s[0]) < float(second_s[0])
    assert float((first_s + second_s)[0]) > float(whole_s[0])


def test_a_drafter_reads_prompts_too() -> None:
    drafted = replace(DATA, drafting=Drafting(draft_tokens=1, acceptance=0.8))
    at = np.array([4096.0])
    more = prompt_step_s(drafted, at, np.zeros(1)) / prompt_step_s(DATA, at, np.zeros(1))
    # One layer beside 61.
    assert 1.005 < float(more[0]) < 1.05


@each_row("tokens", [8.0, 64.0, 1024.0, 8192.0])
def test_the_stated_all_to_all_is_never_faster_than_the_fastest(tokens: float) -> None:
    at = np.array([tokens])
    least = float(DATA.linear_parts(at)["exchange"][0])
    told = {
        kind: float(replace(DATA, a2a_backend=kind).linear_parts(at)["exchange"][0])
        for kind in A2aBackend
        if kind is not A2aBackend.LEAST
    }
    assert min(told.values()) >= least * (1.0 - 1e-9)
    # Low latency for few tokens; beyond its buffers it is the other mode.
    is_few = tokens <= 8.0
    assert (told[A2aBackend.LOW_LATENCY] < told[A2aBackend.NORMAL]) is is_few
    if tokens > 1024.0:
        assert told[A2aBackend.LOW_LATENCY] == pytest.approx(told[A2aBackend.NORMAL])


def test_recorded_loads_price_a_whole_step() -> None:
    share_LE = np.random.default_rng(5).dirichlet(np.full(256, 0.4), size=4)
    linear = ExpertLoads(share_LE=share_LE, top_k=8)
    # Fullest experts first, distributed in turn.
    order_LS = np.argsort(-share_LE, axis=1).reshape(4, 16, 16).transpose(0, 2, 1).reshape(4, 256)
    dealt = ExpertLoads(share_LE=share_LE, top_k=8, expert_LS=order_LS)
    assert dealt.expert_imbalance(16) < linear.expert_imbalance(16)
    linear_s, dealt_s = (step_s(replace(DATA, loads=one), N, PAST) for one in (linear, dealt))
    assert (dealt_s <= linear_s * (1.0 + 1e-9)).all()
    assert dealt_s[-1] < linear_s[-1]


def test_experts_behind_deepep_are_priced_by_what_is_dispatched() -> None:
    # Dispatched copies need no routing, sorting and summing of every rank's tokens.
    at = np.array([512.0])
    gathered, normal = (
        replace(DATA, a2a_backend=kind).linear_parts(at)
        for kind in (A2aBackend.ALLGATHER, A2aBackend.NORMAL)
    )
    assert 0.6 * gathered["experts"][0] < normal["experts"][0] < gathered["experts"][0]
    assert float(normal["exchange"][0]) != pytest.approx(float(gathered["exchange"][0]))


def test_prompts_without_a_graph_wait_for_their_launches() -> None:
    few, none = np.array([500.0]), np.zeros(1)
    engines = {"0.5.8": (61 * 4 + 58 * 0.7) * 0.35e-3, "0.5.10": 0.0, "": 0.0}
    for release, least_s in engines.items():
        one = iteration(DEEPSEEK_V3, attention_tensor=8, moe_tensor=8)
        one = replace(one, release=release)
        # DeepSeek-R1 on 8 B200 with SGLang 0.5.6: prompts delay others' tokens by 97 ms.
        assert one.prompt_launch_s(few)[0] == pytest.approx(least_s)
        assert float(prompt_step_s(one, few, none)[0]) > least_s
        assert float(one.linear_s(few)[0]) < engines["0.5.8"]
    assert replace(TENSOR, release="0.5.8").prompt_launch_s(few)[0] == pytest.approx(80 * 0.7e-3)
    # Through stages, and without CUDA, no release has graphs of prompts.
    assert iteration(LLAMA_70B, attention_tensor=4, pipeline=2).prompt_launch_s(few)[0] > 0.0
    mi300x = ServingMachine(engines=ENGINE_TRAITS, sheet=find_device("mi300x"), tables=None)
    assert replace(TENSOR, machine=mi300x).prompt_launch_s(few)[0] > 0.0
    # TensorRT-LLM has none of prompts; vLLM of 512 tokens at most, and compiles the others.
    sizes = np.array([1.0, 512.0, 513.0])
    for engine, layer_s in (("trtllm", [0.7e-3] * 3), ("vllm", [0.0, 0.0, 0.45e-3])):
        launched_s = replace(TENSOR, traits=ENGINE_TRAITS[engine]).prompt_launch_s(sizes)
        assert launched_s == pytest.approx(80 * np.array(layer_s))
    measured = replace(TENSOR, traits=ENGINE_TRAITS["trtllm"], machine=replace(mi300x, host=HOST))
    assert measured.prompt_launch_s(few)[0] == 0.0


def test_the_release_the_model_and_the_ranks_decide_which_prompts_have_graphs() -> None:
    # Wheels of SGLang 0.5.10.post1, 0.5.14, 0.5.15, 0.5.17 and 0.5.23.
    hopper, blackwell = (
        ServingMachine(engines=ENGINE_TRAITS, sheet=find_device(name), tables=None)
        for name in ("h200-sxm", "b200-sxm")
    )
    latent = iteration(DEEPSEEK_V3, attention_tensor=8, expert=8)
    data = iteration(LLAMA_70B, attention_data=8)
    draft = Drafting(draft_tokens=2, acceptance=0.5)
    named = {
        name: replace(TENSOR, decoder=replace(LLAMA_70B, architecture=name))
        for name in (
            "Qwen3_5MoeForConditionalGeneration",
            "KimiK25ForConditionalGeneration",
            "Llama4ForConditionalGeneration",
            "Qwen3NextForCausalLM",
            "GlmMoeDsaForCausalLM",
        )
    }
    launches = (
        (TENSOR, 9000.0, "10000"),
        (data, 500.0, "11100"),
        (replace(TENSOR, drafting=draft), 500.0, "11000"),
        (replace(TENSOR, a2a_backend=A2aBackend.LOW_LATENCY), 500.0, "11100"),
        (latent, 2048.0, "10110"),
        (latent, 2049.0, "11110"),
        (latent, 8193.0, "11111"),
        (replace(latent, machine=blackwell), 500.0, "10111"),
        (named["Qwen3_5MoeForConditionalGeneration"], 500.0, "11000"),
        (named["KimiK25ForConditionalGeneration"], 500.0, "11110"),
        (named["Llama4ForConditionalGeneration"], 500.0, "10000"),
        (named["Qwen3NextForCausalLM"], 500.0, "11000"),
        (named["GlmMoeDsaForCausalLM"], 500.0, "10000"),
        (iteration(LLAMA_70B, attention_tensor=4, pipeline=2), 500.0, "11111"),
    )
    assert latent.machine.sheet == hopper.sheet
    for launch, tokens, waits in launches:
        found = "".join(
            str(int(replace(launch, release=r).prompt_launch_s(np.array([tokens]))[0] > 0.0))
            for r in ("0.5.9", "0.5.14", "0.5.15", "0.5.17", "0.5.23")
        )
        assert found == waits, (launch.decoder.architecture, tokens)
    sparse = replace(named["GlmMoeDsaForCausalLM"], release="0.5.10")
    assert sparse.prompt_launch_s(np.array([500.0]))[0] > 0.0


def test_steps_of_more_sequences_than_graphs_hold_wait_for_their_launches() -> None:
    one = replace(
        iteration(DEEPSEEK_V3, attention_tensor=8, moe_tensor=8), traits=ENGINE_TRAITS["trtllm"]
    )
    graphed = replace(one, graph_sequences=32.0)
    # The kernels of 4,096 sequences take longer than their launches.
    sizes = np.array([32.0, 33.0, 4096.0])
    plain_s, least_s = step_s(one, sizes, PAST[:3]), (61 * 4 + 58 * 0.7) * 0.35e-3
    stepped_s = step_s(graphed, sizes, PAST[:3])
    assert stepped_s[[0, 2]] == pytest.approx(plain_s[[0, 2]])
    assert plain_s[1] < least_s < stepped_s[1] < least_s + 5e-3


def test_a_step_takes_as_long_as_its_tokens_are_streamed() -> None:
    streamed = replace(DATA, stream_s=1e-3)
    assert step_s(streamed, N, PAST) == pytest.approx(np.maximum(step_s(DATA, N, PAST), 1e-3 * N))
    drafted = replace(streamed, drafting=Drafting(draft_tokens=1, acceptance=1.0))
    assert step_s(drafted, N, PAST)[-1] == pytest.approx(2e-3 * N[-1])


def test_steps_beside_the_normal_kernels_of_deepep_have_no_graph_on_any_engine() -> None:
    for engine, layer_s in (("sglang", 4 * 0.35e-3), ("trtllm", 4 * 0.35e-3), ("vllm", 0.45e-3)):
        few, normal = (
            float(
                step_s(
                    replace(DATA, traits=ENGINE_TRAITS[engine], a2a_backend=own), N[:1], PAST[:1]
                )[0]
            )
            for own in (A2aBackend.LOW_LATENCY, A2aBackend.NORMAL)
        )
        assert normal > 61 * layer_s > few, engine
    eager = replace(DATA, traits=ENGINE_TRAITS["sglang"], is_eager=True)
    drafted = replace(eager, drafting=Drafting(draft_tokens=2, acceptance=0.7))
    longer_s = step_s(drafted, N[:1], PAST[:1]) - step_s(eager, N[:1], PAST[:1])
    # Two passes of a drafter with one layer.
    assert longer_s[0] > 2 * 4 * 0.35e-3
