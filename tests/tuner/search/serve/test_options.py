"""Instance options: what is tried, what is counted out, what another beats."""

from dataclasses import replace

import numpy as np
import pytest

from tests.tuner.models import example_model
from tests.tuner.search.serve.testing import FORMATS, demand, serving_pool
from tuner.config.serve import Role
from tuner.costs.serve.decoder import Decoder, decoder_of
from tuner.costs.serve.engine import A2aBackend
from tuner.costs.serve.speculative import Drafting
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.search.serve.choices import BUDGETS, Choices, TokenBudget, engine_budgets, usual_choices
from tuner.search.serve.demand import Demand
from tuner.search.serve.instances import to_instance_group
from tuner.search.serve.options import (
    NO_ROOM,
    SLOW_PROMPT,
    SLOW_TOKEN,
    Option,
    Options,
    ServingPool,
    device_memory_bytes,
    drop_dominated,
    price_options,
    step_seconds,
)

ROLES = (Role.AGGREGATED, Role.PREFILL, Role.DECODE)
A2A_BACKENDS = (A2aBackend.ALLGATHER, A2aBackend.NORMAL, A2aBackend.LOW_LATENCY)
DRAFTING = Drafting(draft_tokens=2, acceptance=0.8)


def decoder(model: str) -> Decoder:
    return decoder_of(example_model(model))


def found_of(
    serving_pool: ServingPool,
    demand: Demand,
    *,
    model: str = "deepseek-v3",
    engine: str = "sglang",
    **choices: object,
) -> Options:
    stated: dict[str, object] = {
        "budgets": engine_budgets(ENGINE_TRAITS[engine], longest=demand.most_tokens)
    }
    return price_options(
        (serving_pool,),
        decoder=decoder(model),
        formats=FORMATS,
        traits=ENGINE_TRAITS[engine],
        demand=demand,
        roles=ROLES,
        choices=Choices(**(stated | choices)),  # type: ignore[arg-type]  # named by the tests
    )


def test_every_option_holds_its_batch_and_meets_its_targets() -> None:
    asked = demand(slo={"ttft": {"p90": 2.0}, "tpot": {"p90": 0.05}})
    place = serving_pool("h200-sxm")
    found = found_of(place, asked, a2a_backends=A2A_BACKENDS, drafting=DRAFTING)
    assert {option.role for option in found.options} == set(ROLES)
    for option in found.options:
        assert option.tpot_s <= 0.05
        assert option.ttft_s <= 2.0
        assert option.running * asked.held_tokens <= option.kv_tokens or option.running == 1
        assert device_memory_bytes(option, asked) <= place.memory_bytes


def test_no_batch_is_larger_than_a_closed_loop_is() -> None:
    for concurrency in (2, 64):
        found = found_of(serving_pool("h200-sxm"), demand(concurrency=concurrency, rate=None))
        assert {one.role for one in found.options} == set(ROLES)
        assert max(one.running for one in found.options) <= concurrency


def test_infeasible_options_are_counted_by_reason() -> None:
    memory = found_of(serving_pool("h100-sxm", nodes=1), demand())
    assert set(memory.illegal_by) == {NO_ROOM}
    assert not memory.options
    slow = found_of(serving_pool("h200-sxm"), demand(slo={"ttft": {"p90": 0.05}}))
    assert slow.illegal_by[SLOW_PROMPT] > 0
    assert {option.role for option in slow.options} == {Role.DECODE}
    late = found_of(serving_pool("h200-sxm"), demand(slo={"tpot": {"p90": 0.002}}))
    assert late.illegal_by[SLOW_TOKEN] > 0
    assert {option.role for option in late.options} == {Role.PREFILL}


def test_a_release_that_refuses_every_option_of_a_role_is_named() -> None:
    found = price_options(
        (serving_pool("h200-sxm"),),
        decoder=decoder("deepseek-v3"),
        formats=FORMATS,
        traits=ENGINE_TRAITS["sglang"],
        demand=demand(),
        roles=ROLES,
        refuse=lambda option: "no prefill" if option.role is Role.PREFILL else "",
    )
    assert found.refused == {Role.PREFILL: "no prefill"}
    assert found.illegal_by["no prefill"] > 0


def test_data_ranks_exchange_by_kernels_made_for_their_role() -> None:
    found = found_of(
        serving_pool("h200-sxm"),
        demand(),
        a2a_backends=A2A_BACKENDS,
        overlapped=frozenset({A2aBackend.NORMAL}),
    )
    used = {
        role: {
            to_instance_group(option, count=1).a2a_backend
            for option in found.options
            if option.role is role and option.degrees.attention_data > 1
        }
        for role in ROLES
    }
    assert "deepep_low_latency" not in used[Role.PREFILL]
    assert "deepep_normal" not in used[Role.DECODE]
    assert any(option.iteration.two_batch_overlap for option in found.options)
    for option in found.options:
        if option.iteration.two_batch_overlap:
            assert option.iteration.a2a_backend is A2aBackend.NORMAL


def test_drafting_is_tried_beside_none() -> None:
    asked = demand(slo={"tpot": {"p90": 0.05}})
    plain = found_of(serving_pool("h200-sxm"), asked)
    drafted = found_of(serving_pool("h200-sxm"), asked, drafting=DRAFTING)
    assert drafted.slowest_tpot_s < 0.6 * plain.slowest_tpot_s
    assert best(drafted, Role.DECODE) > 1.05 * best(plain, Role.DECODE)
    assert best(
        found_of(serving_pool("h200-sxm"), asked, drafting=replace(DRAFTING, acceptance=0.0)),
        Role.DECODE,
    ) == pytest.approx(best(plain, Role.DECODE))
    launched = [to_instance_group(option, count=1).draft_tokens for option in drafted.options]
    assert {0, 2} <= set(launched) <= {0, 1, 2}


def test_drafts_are_as_deep_as_their_acceptance_pays() -> None:
    # The second draft is hardly ever kept: its pass and the wider check only cost.
    asked = demand(slo={"tpot": {"p90": 0.05}})
    for acceptance, deepest in (((0.9, 0.02), 1), ((0.9, 0.9), 2), ((0.02, 0.9), 0)):
        drafting = replace(DRAFTING, acceptance=acceptance)
        found = found_of(serving_pool("h200-sxm"), asked, drafting=drafting)
        decode = [option for option in found.options if option.role is Role.DECODE]
        fastest = max(decode, key=lambda option: option.rate_per_s / option.devices)
        assert to_instance_group(fastest, count=1).draft_tokens == deepest, acceptance


def decisions(option: Option) -> dict[str, object]:
    """What is decided of an instance, by name."""
    iteration, degrees = option.iteration, option.degrees
    return {
        **{name: getattr(degrees, name) for name in degrees.__dataclass_fields__},
        "role": option.role,
        "pool": option.serving_pool.pool.name,
        "a2a_backend": iteration.a2a_backend,
        "drafting": iteration.drafting,
        "two_batch_overlap": iteration.two_batch_overlap,
        "budget": TokenBudget(tokens=option.step_tokens, is_chunked=option.is_chunked),
    }


def test_a_decision_is_priced_alone_as_among_others() -> None:
    # Budgets and roles share the prices of steps, and a step's batches are priced in one array.
    asked = demand(slo={"ttft": {"p90": 2.0}, "tpot": {"p90": 0.05}})
    overlapped = frozenset({A2aBackend.NORMAL, A2aBackend.LOW_LATENCY})
    place = serving_pool("h200-sxm")
    found = found_of(
        place, asked, a2a_backends=A2A_BACKENDS, drafting=DRAFTING, overlapped=overlapped
    )
    value_of = {pair: option for option in found.options for pair in decisions(option).items()}
    assert {"a2a_backend", "drafting", "two_batch_overlap", "budget", "role"} <= {
        name
        for name, _ in value_of
        if len({value for other, value in value_of if other == name}) > 1
    }
    for option in dict.fromkeys(value_of.values()):
        decided, iteration = decisions(option), option.iteration
        alone = found_of(
            place,
            asked,
            budgets=(decided["budget"],),
            drafting=iteration.drafting,
            a2a_backends=(iteration.a2a_backend,),
            overlapped=frozenset({iteration.a2a_backend} if iteration.two_batch_overlap else ()),
        )
        assert [
            (same.rate_per_s, same.ttft_s, same.tpot_s, same.kv_tokens)
            for same in alone.options
            if decisions(same) == decided and same.running == option.running
        ] == [(option.rate_per_s, option.ttft_s, option.tpot_s, option.kv_tokens)], decided
        batches = np.array([1.0, option.running])
        both_s = step_seconds(iteration, batches, asked)
        for batch, step_s in zip(batches, both_s, strict=True):
            assert step_seconds(iteration, np.array([batch]), asked) == pytest.approx([step_s])
        assert found.slowest_tpot_s <= option.tpot_s or option.role is Role.PREFILL
        assert found.slowest_ttft_s <= option.ttft_s or option.role is Role.DECODE


def best(found: Options, role: Role) -> float:
    """Of the most requests a second and device."""
    return max(one.rate_per_s / one.devices for one in found.options if one.role is role)


def test_budgets_are_chunked_unless_an_engine_takes_whole_prompts() -> None:
    assert engine_budgets(ENGINE_TRAITS["vllm"], longest=4000) == tuple(
        TokenBudget(tokens=tokens, is_chunked=True) for tokens in BUDGETS
    )
    whole = [
        one.tokens
        for one in engine_budgets(ENGINE_TRAITS["trtllm"], longest=4000)
        if not one.is_chunked
    ]
    assert whole == [4096, 8192, 16384]
    assert usual_choices(ENGINE_TRAITS["trtllm"]).budgets == (
        TokenBudget(tokens=8192, is_chunked=False),
    )


def test_an_instance_is_stated_with_its_budget_and_pages() -> None:
    found = found_of(
        serving_pool("h200-sxm"),
        demand(),
        budgets=(TokenBudget(tokens=4096, is_chunked=True),),
        page_by_pool={"h200-sxm": 64},
    )
    for option in found.options:
        stated = to_instance_group(option, count=3)
        assert (stated.count, stated.page_size) == (3, 64)
        assert (stated.max_batched_tokens, stated.chunked_prefill) == (4096, True)
        assert stated.devices == stated.attention_tp * stated.attention_dp * stated.pp


def test_cards_on_a_bus_are_offered_pipelines() -> None:
    slow = found_of(serving_pool("l40s"), demand(), model="llama-3.1-70b", engine="vllm")
    fast = found_of(serving_pool("h100-sxm"), demand(), model="llama-3.1-70b", engine="vllm")
    assert any(option.degrees.pipeline > 1 for option in slow.options)
    assert not any(option.degrees.pipeline > 1 for option in fast.options)


def test_a_model_that_no_domain_holds_is_offered_pipelines() -> None:
    found = found_of(
        serving_pool("h100-sxm", nodes=4),
        demand(),
        model="llama-3.1-405b",
        engine="vllm",
    )
    bf16 = price_options(
        (serving_pool("h100-sxm", nodes=4),),
        decoder=decoder("llama-3.1-405b"),
        formats=replace(FORMATS, attention="bf16", output="bf16", ffn="bf16"),
        traits=ENGINE_TRAITS["vllm"],
        demand=demand(),
        roles=ROLES,
    )
    assert {option.degrees.pipeline for option in found.options} == {1}
    assert min(option.degrees.pipeline for option in bf16.options) == 2


def test_what_another_beats_in_everything_is_dropped() -> None:
    found = found_of(serving_pool("h200-sxm"), demand(slo={"tpot": {"p90": 0.05}}))
    assert found.beaten > 0
    one = next(option for option in found.options if option.role is Role.DECODE)
    worse = replace(one, rate_per_s=0.9 * one.rate_per_s, tpot_s=1.1 * one.tpot_s)
    quick = replace(worse, tpot_s=0.5 * one.tpot_s)
    assert drop_dominated([worse, one, quick]) == (one, quick)


def test_a_like_split_is_no_tie_and_an_unlike_one_within_the_band_is() -> None:
    found = found_of(serving_pool("h200-sxm"), demand(slo={"tpot": {"p90": 0.05}}))
    one = next(option for option in found.options if option.role is Role.DECODE)
    near = replace(one, rate_per_s=0.97 * one.rate_per_s)
    other = replace(near, degrees=replace(one.degrees, attention_data=2 * one.devices))
    assert drop_dominated([one, near]) == (one,)
    # Twice the devices at twice the rate, but 3 %: the model cannot tell them apart.
    twice = replace(other, rate_per_s=1.94 * one.rate_per_s)
    half = replace(other, rate_per_s=one.rate_per_s)
    assert same_split(one, twice)
    assert drop_dominated([one, twice]) == (one, twice)
    assert drop_dominated([one, half]) == (one,)


def same_split(one: Option, other: Option) -> bool:
    """What dominance compares only alike."""
    return one.degrees.attention_tensor == other.degrees.attention_tensor
