"""Each engine's share of memory, by hand and against published logs."""

from dataclasses import replace

import pytest

from tests.tuner.decoders import GPT_OSS_120B
from tests.tuner.models import example_model
from tuner.catalog.serve_rules.traits import MemoryRule
from tuner.costs.serve.cache_capacity import GIB, room_of, visible_bytes
from tuner.costs.serve.capacity import filled_ratio, instance_kv_bytes_per_token, padding_factor
from tuner.costs.serve.decoder import Formats, decoder_of
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.memory import weight_bytes
from tuner.costs.serve.reserve import Reserve
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.engines.sglang.read import automatic_ratio, usual_captured
from tuner.prices.serve.machine import ServingMachine

RESERVE = Reserve(
    context=0.5 * GIB,
    communicators=1.5 * GIB,
    activations=4.0 * GIB,
    graphs=1.0 * GIB,
    buffers=0.5 * GIB,
)
MXFP4 = Formats(attention="bf16", output="bf16", ffn="bf16", experts="mxfp4", kv="bf16")


def rule_of(engine: str, release: str = "") -> MemoryRule:
    return ENGINE_TRAITS[engine].memory_rule(release)


def test_engines_take_a_share_of_unlike_things() -> None:
    # 79.16 GiB are visible of 80, 77.16 free, 50 are weights.
    given = {"weights": 50.0 * GIB, "reserve": RESERVE, "memory_bytes": 80.0 * GIB, "ratio": 0.9}
    found = {
        (engine, release): room_of(rule_of(engine, release), **given).cache_bytes / GIB  # type: ignore[arg-type]
        for engine, release in (
            ("vllm", ""),
            ("vllm", "0.9.2"),
            ("sglang", ""),
            ("trtllm", ""),
        )
    }
    assert found == {
        # Of the device, less activations, buffers and, since 0.21, graphs.
        ("vllm", ""): pytest.approx(0.9 * 79.156 - 50.0 - 5.5),
        # Before: communicators, no graphs.
        ("vllm", "0.9.2"): pytest.approx(0.9 * 79.156 - 50.0 - 6.0),
        # Of what is free before weights are loaded; steps have the rest.
        ("sglang", ""): pytest.approx(0.9 * 77.156 - 50.0),
        # Of what weights and steps leave.
        ("trtllm", ""): pytest.approx(0.9 * (77.156 - 50.0 - 5.5)),
    }


def test_a_share_that_leaves_steps_too_little_says_how_much() -> None:
    given = {"weights": 50.0 * GIB, "reserve": RESERVE, "memory_bytes": 80.0 * GIB}
    rule = rule_of("sglang")
    # 2 % of 77.16 GiB for steps that take 5.5.
    tight = room_of(rule, ratio=0.98, **given)  # type: ignore[arg-type]
    assert tight.lacking_bytes / GIB == pytest.approx(5.5 - 0.02 * 77.156)
    assert room_of(rule, ratio=0.9, **given).lacking_bytes == 0.0  # type: ignore[arg-type]
    # A plan that states its own leaves room for steps and a twentieth.
    own = room_of(rule, **given)  # type: ignore[arg-type]
    assert own.lacking_bytes == 0.0
    assert own.ratio == pytest.approx(0.95 - 5.5 / 77.156, abs=1e-3)


def test_sglangs_own_share_follows_its_formula() -> None:
    def share(degrees: InstanceDegrees, *, tokens: int, captured: int, **flags: bool) -> float:
        named = {"has_prompts": True, "has_latent_cache": False, "has_deepep": False, **flags}
        return automatic_ratio(
            degrees,
            memory_bytes=80.0 * GIB,
            active_tokens=tokens,
            captured=captured,
            **named,
        )

    # 512 + 1.5 x 8192 + 4 / 8 x 1024 + 2 x 512 + 8 x 58 MiB of 80 GiB.
    four = share(InstanceDegrees(attention_tensor=4), tokens=8192, captured=512)
    assert four == pytest.approx(1.0 - 14800 / 81920)
    # A floor of 10 GiB for small chunks.
    assert share(InstanceDegrees(), tokens=2048, captured=8) == pytest.approx(0.875)
    # Eight data ranks with chunks of 16,384 tokens each leave nothing, as the engine then says.
    assert share(InstanceDegrees(attention_data=8), tokens=8 * 16_384, captured=512) < 0.0


def test_sglangs_largest_graph_follows_the_memory_of_a_device() -> None:
    for gib, one, four in ((16, 8, 8), (22.5, 48, 160), (48, 32, 160), (80, 256, 512)):
        found = [usual_captured(gib * GIB, devices=devices) for devices in (1, 4)]
        assert found == [one, four]
    assert usual_captured(180.0 * GIB, devices=1) == 512


def test_padded_experts_weigh_what_logs_of_gpt_oss_say() -> None:
    # "Model loading took" on one H100: 65.9651 GiB with Marlin's kernels (vLLM 0.10.1, issue
    # 23278), 64.38 with Triton's (0.14.1, issue 33155); biases are not counted here.
    own = Iteration(
        decoder=GPT_OSS_120B,
        formats=MXFP4,
        degrees=InstanceDegrees(),
        traits=ENGINE_TRAITS["vllm"],
        machine=ServingMachine(engines=ENGINE_TRAITS, sheet=find_device("h100-sxm"), tables=None),
    )
    marlin, triton = replace(own, release="0.10.1"), replace(own, release="0.14.1")
    assert padding_factor(marlin) == pytest.approx(3072 * 2944 / 2880**2)
    assert padding_factor(triton) == padding_factor(own) == pytest.approx(3072 / 2880)
    experts = 36 * 128 * 3 * 2880**2 * 0.53125
    plain = weight_bytes(GPT_OSS_120B, MXFP4, InstanceDegrees())
    for released, logged in ((marlin, 65.97), (triton, 64.38)):
        total = plain + (padding_factor(released) - 1.0) * experts
        assert total == pytest.approx(logged * GIB, rel=0.01)
    ampere = replace(
        own,
        machine=ServingMachine(
            engines=ENGINE_TRAITS, sheet=find_device("a100-80gb-sxm"), tables=None
        ),
    )
    assert padding_factor(ampere) == pytest.approx(3072 * 2944 / 2880**2)


def test_what_cuda_shows_is_what_published_logs_say() -> None:
    for memory, shown in ((24, 23.55), (80, 79.2), (96, 95.0), (141, 139.8), (180, 178.4)):
        assert visible_bytes(memory * GIB) == pytest.approx(shown * GIB, rel=2e-3)


def test_sglang_counts_and_keeps_sparse_caches_in_fp8_by_release_and_device() -> None:
    # Up to 0.5.16 a layer's token counts as 576 + 132 bytes; until 0.5.10, and on Hopper, it takes
    # 656 + 132. GLM-5 on 8 MI355X under 0.5.8 logs 186.77 GiB for 3,262,823 tokens of 78 layers.
    logged_bytes = 186.77 * GIB / 3_262_823 / 78
    assert logged_bytes == pytest.approx(788.0, rel=1e-3)
    formats = replace(MXFP4, experts="fp8_block", kv="fp8")
    for device, release, kept, counted in (
        ("mi355x", "0.5.8", 788.0, 708.0),
        ("mi355x", "0.5.18", 708.0, 708.0),
        ("b200-sxm", "0.5.10", 708.0, 708.0),
        ("b200-sxm", "", 708.0, 708.0),
        ("h200-sxm", "0.5.16", 788.0, 708.0),
        ("h200-sxm", "0.5.17", 788.0, 788.0),
    ):
        own = Iteration(
            decoder=decoder_of(example_model("glm-5")),
            formats=formats,
            degrees=InstanceDegrees(attention_tensor=8),
            traits=ENGINE_TRAITS["sglang"],
            machine=ServingMachine(engines=ENGINE_TRAITS, sheet=find_device(device), tables=None),
            release=release,
        )
        assert instance_kv_bytes_per_token(own) == pytest.approx(78 * kept), (device, release)
        assert filled_ratio(own) == pytest.approx(kept / counted), (device, release)
