"""The legality table, row by row as the releases' sources have it."""

import re
from dataclasses import replace

import pytest

from tests.expect import present
from tests.rows import each_row
from tests.tuner.models import example_model
from tuner.catalog.serve_rules import kv_refusals
from tuner.catalog.serve_rules.kv_cache import CacheKind, Connector, KvPages
from tuner.catalog.serve_rules.kv_refusals import KvSide, KvTransfer
from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.devices.datasheet import Generation
from tuner.engines.serving.releases import EVERY_RELEASE, engine_manifest
from tuner.spec.linear_attention import LinearName
from tuner.spec.serving.goal import Engine

SIDE = KvSide(tensor=4, page_tokens=16, dtype="fp8", layout="hnd")
RELEASES = EVERY_RELEASE
EVERY = [(release, row.connector, row.cache) for release in RELEASES for row in release.transfers]


def refusals(pair: KvTransfer, *, engine: str, connector: Connector) -> tuple[str, ...]:
    newest = next(release for release in RELEASES if release.name == engine)
    return kv_refusals.refusals(pair, engine=newest, connector=connector)


def between(
    prefill: KvSide = SIDE,
    decode: KvSide = SIDE,
    *,
    cache: CacheKind = CacheKind.GROUPED,
    heads: int = 8,
    is_hybrid: bool = False,
) -> KvTransfer:
    return KvTransfer(
        cache=cache,
        num_kv_heads=1 if cache is CacheKind.LATENT else heads,
        is_hybrid=is_hybrid,
        prefill=prefill,
        decode=decode,
    )


def wide(tensor: int, **changes: object) -> KvSide:
    return replace(SIDE, tensor=tensor, **changes)  # type: ignore[arg-type]  # fields by name


def nhd(tensor: int, **changes: object) -> KvSide:
    return wide(tensor, layout="nhd", **changes)


@each_row(("release", "connector", "cache"), EVERY)
@each_row("is_hybrid", (False, True))
def test_identical_instances_can_always_transfer(
    *, release: ServingCapabilities, connector: Connector, cache: CacheKind, is_hybrid: bool
) -> None:
    pair = between(cache=cache, is_hybrid=is_hybrid)
    assert kv_refusals.refusals(pair, engine=release, connector=connector) == ()


@each_row(("release", "connector", "cache"), EVERY)
def test_no_connector_converts_types_or_pairs_ranks_that_do_not_divide(
    release: ServingCapabilities, connector: Connector, cache: CacheKind
) -> None:
    types = between(decode=replace(SIDE, dtype="bf16"), cache=cache)
    (line,) = kv_refusals.refusals(types, engine=release, connector=connector)
    assert "KV types fp8 and bf16 differ" in line
    ranks = between(wide(2), wide(3), cache=cache)
    lines = kv_refusals.refusals(ranks, engine=release, connector=connector)
    assert any("2 (prefill) and 3 (decode): one must be a multiple" in line for line in lines)


@each_row(("release", "connector", "cache"), EVERY)
def test_every_row_names_its_source_and_is_unique(
    release: ServingCapabilities, connector: Connector, cache: CacheKind
) -> None:
    rows = [row for row in release.transfers if (row.connector, row.cache) == (connector, cache)]
    assert len(rows) == 1
    assert rows[0].source.startswith(f"{release.name} {release.release}: ")
    assert re.search(r"\.(py|cpp)\b", rows[0].source)
    assert release.connector_rules(connector, cache=cache) is rows[0]


NIXL, PUSH, MOONCAKE = Connector.NIXL, Connector.NIXL_PUSH, Connector.MOONCAKE
LATENT = CacheKind.LATENT
MAMBA2 = replace(between(is_hybrid=True), states=LinearName.MAMBA2)
UNMOVED = "the states of mamba2 layers cannot be moved; plan aggregated instances"


def pipelines(one: int, other: int) -> KvTransfer:
    return between(replace(SIDE, pipeline=one), replace(SIDE, pipeline=other))


def typed(dtype: str, layout: str, *tensors: int) -> KvTransfer:
    return between(*[wide(tensor, dtype=dtype, layout=layout) for tensor in tensors])


@each_row(
    ("engine", "connector", "pair", "said"),
    [
        # A latent goes between any multiples.
        *(
            (engine, connector, between(wide(one), wide(other), cache=LATENT), "")
            for engine, connector in (("vllm", NIXL), ("vllm", MOONCAKE), ("sglang", MOONCAKE))
            for one, other in ((1, 8), (8, 1), (16, 2), (2, 16))
        ),
        # Heads are cut from head-major pages in vLLM and token-major ones in SGLang.
        *(
            row
            for connector in (NIXL, MOONCAKE)
            for row in (
                ("vllm", connector, between(wide(4), wide(8)), ""),
                (
                    "vllm",
                    connector,
                    between(nhd(4), nhd(8)),
                    "heads cannot be split in nhd pages; use hnd",
                ),
                ("sglang", connector, between(nhd(4), nhd(8)), ""),
                ("sglang", connector, between(wide(4), wide(8)), "use nhd"),
            )
        ),
        # 8 and 16 ranks of 8 heads hold one head each.
        ("vllm", MOONCAKE, between(nhd(8), nhd(16)), ""),
        (
            "vllm",
            NIXL,
            between(wide(4), nhd(4)),
            "page layouts hnd and nhd differ; give both sides hnd",
        ),
        ("vllm", NIXL, between(wide(4), nhd(4), cache=LATENT), ""),
        # vLLM reads no copies into a narrower decode.
        ("vllm", NIXL, between(wide(16), wide(4)), "wider prefill exceeds 8 key-value heads"),
        ("vllm", NIXL, between(wide(4), wide(16)), ""),
        ("vllm", PUSH, between(wide(4), wide(16)), "wider decode exceeds 8"),
        ("sglang", NIXL, between(nhd(16), nhd(4)), ""),
        # Page sizes that vLLM reads; everyone else needs equal ones.
        *(
            ("vllm", NIXL, between(prefill, decode, is_hybrid=is_hybrid), said)
            for prefill, decode, is_hybrid, said in (
                (wide(4), wide(4, page_tokens=64), False, ""),
                (wide(4, page_tokens=64), wide(4), False, "prefill's must divide decode's"),
                (wide(4), wide(4, page_tokens=24), False, "prefill's must divide decode's"),
                (wide(4), wide(4, page_tokens=64), True, "a hybrid model forbids"),
                (
                    wide(4),
                    wide(4, page_tokens=64, uses_host_buffer=True),
                    False,
                    "a host buffer forbids",
                ),
                (wide(8), wide(4, page_tokens=64), False, "a wider prefill forbids"),
                (wide(4), wide(8, page_tokens=64), False, ""),
            )
        ),
        *(
            (
                engine,
                connector,
                between(nhd(4), nhd(4, page_tokens=64)),
                "page sizes 16 (prefill) and 64 (decode) differ; give both sides one",
            )
            for engine, connector in (
                ("sglang", NIXL),
                ("sglang", MOONCAKE),
                ("vllm", MOONCAKE),
                ("vllm", PUSH),
            )
        ),
        # Pipelines that go together.
        ("vllm", NIXL, pipelines(2, 1), "both must be 1"),
        ("vllm", PUSH, pipelines(2, 1), ""),
        ("vllm", PUSH, pipelines(2, 2), "decode's must be 1"),
        ("vllm", MOONCAKE, pipelines(2, 4), ""),
        ("sglang", NIXL, pipelines(4, 1), ""),
        ("sglang", NIXL, pipelines(4, 4), ""),
        ("sglang", MOONCAKE, pipelines(4, 2), "decode's must be 1 or prefill's"),
        # Hybrid models have rules of their own.
        (
            "vllm",
            PUSH,
            between(wide(2), wide(4), is_hybrid=True),
            "needs decode's to be prefill's at most",
        ),
        (
            "sglang",
            MOONCAKE,
            between(nhd(2, pipeline=2), nhd(4), is_hybrid=True),
            "one tensor degree, or no pipeline",
        ),
        # Types with separate scales cannot be split.
        ("vllm", MOONCAKE, typed("nvfp4", "hnd", 2, 4), "heads of a nvfp4 cache cannot be split"),
        ("vllm", MOONCAKE, typed("nvfp4", "hnd", 2, 2), ""),
        ("sglang", MOONCAKE, typed("mxfp8", "nhd", 2, 4), "heads of a mxfp8 cache cannot be split"),
        ("sglang", MOONCAKE, typed("mxfp8", "nhd", 2, 2), ""),
        # TensorRT-LLM wants one page size and re-slices the rest.
        *(
            row
            for cache in CacheKind
            for row in (
                (
                    "trtllm",
                    NIXL,
                    between(wide(4), wide(4, page_tokens=32), cache=cache),
                    "page sizes 16 (prefill) and 32 (decode) differ",
                ),
                (
                    "trtllm",
                    NIXL,
                    between(wide(2, pipeline=4), wide(8, pipeline=2), cache=cache),
                    "",
                ),
            )
        ),
        # States move where a connector knows their kind.
        ("vllm", NIXL, MAMBA2, ""),
        ("vllm", MOONCAKE, replace(MAMBA2, states=LinearName.GATED_DELTA), ""),
        ("vllm", MOONCAKE, MAMBA2, f"vllm 0.33.0 mooncake: {UNMOVED}"),
        ("trtllm", NIXL, MAMBA2, ""),
        ("trtllm", MOONCAKE, MAMBA2, f"trtllm 1.3.0rc27 mooncake: {UNMOVED}"),
        ("sglang", NIXL, replace(MAMBA2, prefill=nhd(4), decode=nhd(4)), ""),
        (
            "vllm",
            PUSH,
            replace(MAMBA2, prefill=wide(4, pipeline=2)),
            "vllm 0.33.0 nixl_push: states cannot be moved between pipelines; give both sides 1"
            " stage, not 2",
        ),
    ],
)
def test_what_a_connector_of_an_engine_moves(
    engine: str, connector: Connector, pair: KvTransfer, said: str
) -> None:
    lines = refusals(pair, engine=engine, connector=connector)
    assert len(lines) == bool(said)
    assert said in "".join(lines)


def test_rows_are_described_or_an_error() -> None:
    said = r"no connector nixl_push; it has \['ascend', 'mooncake', 'nixl'\]"
    with pytest.raises(ValueError, match=said):
        refusals(between(), engine="sglang", connector=PUSH)
    vllm = [release for release in RELEASES if release.name == "vllm"]
    assert {row.connector for release in vllm for row in release.transfers} == set(Connector)


@each_row(
    ("folder", "is_hybrid"),
    [
        ("mixtral-8x7b", False),
        ("gpt-oss-20b", True),
        ("nemotron-3-nano", True),
        ("llama-4-scout", True),
        ("deepseek-v3.2", False),
        ("deepseek-v4-flash", True),
    ],
)
def test_hybrids_keep_different_things_of_the_past(folder: str, is_hybrid: bool) -> None:
    assert kv_refusals.has_different_caches(example_model(folder)) == is_hybrid


# Pages that launchers leave to the engine, release by release.

USUAL = (1, 16, 32, 64, 128)


def pages_of(engine: str, generation: Generation) -> KvPages:
    named = Engine.model_validate({"name": engine})
    return engine_manifest(named, vendor=generation.vendor).pages


@each_row(
    ("engine", "cache", "generation", "dtype", "tokens"),
    [
        ("vllm", CacheKind.GROUPED, Generation.HOPPER, "fp8", 16),
        ("vllm", CacheKind.GROUPED, Generation.BLACKWELL, "bf16", 16),
        ("vllm", CacheKind.LATENT, Generation.ADA, "fp8", 16),
        ("vllm", CacheKind.LATENT, Generation.HOPPER, "bf16", 16),
        ("vllm", CacheKind.LATENT, Generation.HOPPER, "fp8", 64),
        ("vllm", CacheKind.LATENT, Generation.BLACKWELL, "fp8", 32),
        ("sglang", CacheKind.GROUPED, Generation.HOPPER, "bf16", 1),
        ("sglang", CacheKind.LATENT, Generation.BLACKWELL, "bf16", 64),
        ("sglang", CacheKind.GROUPED, Generation.CDNA3, "bf16", 1),
        ("vllm", CacheKind.GROUPED, Generation.CDNA3, "bf16", 16),
        ("vllm", CacheKind.LATENT, Generation.ASCEND, "bf16", 128),
        ("sglang", CacheKind.GROUPED, Generation.ASCEND, "bf16", 128),
        ("trtllm", CacheKind.GROUPED, Generation.HOPPER, "bf16", 32),
        ("trtllm", CacheKind.LATENT, Generation.HOPPER, "bf16", 64),
        ("trtllm", CacheKind.LATENT, Generation.BLACKWELL, "fp8", 32),
    ],
)
def test_pages_are_those_of_the_default_kernels(
    engine: str, cache: CacheKind, generation: Generation, dtype: str, tokens: int
) -> None:
    pages = pages_of(engine, generation)
    assert pages.default(cache=cache, generation=generation, dtype=dtype) == tokens


@each_row(
    ("engine", "cache", "generation", "dtype", "tokens"),
    [
        ("vllm", CacheKind.GROUPED, Generation.HOPPER, "bf16", (16, 32, 64, 128)),
        ("vllm", CacheKind.LATENT, Generation.HOPPER, "fp8", (64, 128)),
        ("vllm", CacheKind.LATENT, Generation.BLACKWELL, "bf16", (32, 64, 128)),
        ("sglang", CacheKind.GROUPED, Generation.ADA, "bf16", (1, 16, 32, 64, 128)),
        ("sglang", CacheKind.GROUPED, Generation.BLACKWELL, "bf16", (16, 32, 64, 128)),
        ("sglang", CacheKind.LATENT, Generation.BLACKWELL, "bf16", (32, 64)),
        ("vllm", CacheKind.GROUPED, Generation.CDNA3, "bf16", (16, 32, 64, 128)),
        ("vllm", CacheKind.GROUPED, Generation.ASCEND, "bf16", (128,)),
        ("trtllm", CacheKind.GROUPED, Generation.HOPPER, "bf16", (32, 64)),
        ("trtllm", CacheKind.LATENT, Generation.HOPPER, "bf16", (64,)),
    ],
)
def test_pages_that_may_be_stated_are_those_of_the_preferred_kernels(
    engine: str, cache: CacheKind, generation: Generation, dtype: str, tokens: tuple[int, ...]
) -> None:
    pages = pages_of(engine, generation)
    legal = present(pages.legal(cache=cache, generation=generation, dtype=dtype))
    assert tuple(page for page in USUAL if legal.holds(page)) == tokens
    assert pages.default(cache=cache, generation=generation, dtype=dtype) in tokens


def test_pages_of_an_unknown_device_suit_all_devices() -> None:
    vllm, sglang = (
        pages_of(engine, Generation.HOPPER).legal(
            cache=CacheKind.LATENT, generation=None, dtype="fp8"
        )
        for engine in ("vllm", "sglang")
    )
    assert vllm is not None
    assert vllm.holds(16)
    assert not vllm.holds(24)
    assert sglang is None
