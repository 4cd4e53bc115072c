"""The legality table, row by row as the releases' sources have it."""

import re
from dataclasses import replace

import pytest

from tests.expect import present
from tests.rows import each_row
from tests.tuner.models import example_model
from tuner.devices.datasheet import Generation
from tuner.engines.registry import serve_releases
from tuner.engines.serve_capabilities import engine_manifest
from tuner.engines.serve_rules import kv_refusals
from tuner.engines.serve_rules.kv_cache import CacheKind, Connector, KvPages
from tuner.engines.serve_rules.kv_refusals import KvSide, KvTransfer
from tuner.engines.serve_rules.manifest import ServingCapabilities
from tuner.spec.linear_attention import LinearName
from tuner.spec.serving.goal import Engine

SIDE = KvSide(tensor=4, page_tokens=16, dtype="fp8", layout="hnd")
RELEASES = tuple(serve_releases())
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


@each_row(
    ("engine", "connector"),
    [("vllm", Connector.NIXL), ("vllm", Connector.MOONCAKE), ("sglang", Connector.MOONCAKE)],
)
@each_row(("one", "other"), [(1, 8), (8, 1), (16, 2), (2, 16)])
def test_a_latent_goes_between_any_multiples(
    engine: str, connector: Connector, one: int, other: int
) -> None:
    pair = between(wide(one), wide(other), cache=CacheKind.LATENT)
    assert refusals(pair, engine=engine, connector=connector) == ()


@each_row("connector", [Connector.NIXL, Connector.MOONCAKE])
def test_heads_are_cut_from_head_major_pages_in_vllm_and_token_major_ones_in_sglang(
    connector: Connector,
) -> None:
    assert refusals(between(wide(4), wide(8)), engine="vllm", connector=connector) == ()
    (line,) = refusals(between(nhd(4), nhd(8)), engine="vllm", connector=connector)
    assert "heads cannot be split in nhd pages; use hnd" in line
    assert refusals(between(nhd(4), nhd(8)), engine="sglang", connector=connector) == ()
    (line,) = refusals(between(wide(4), wide(8)), engine="sglang", connector=connector)
    assert "use nhd" in line


def test_rows_of_pairs_are_described_or_an_error() -> None:
    # 8 and 16 ranks of 8 heads hold one head each.
    pair = between(nhd(8), nhd(16))
    assert refusals(pair, engine="vllm", connector=Connector.MOONCAKE) == ()
    (line,) = refusals(between(wide(4), nhd(4)), engine="vllm", connector=Connector.NIXL)
    assert "page layouts hnd and nhd differ; give both sides hnd" in line
    mixed = between(wide(4), nhd(4), cache=CacheKind.LATENT)
    assert refusals(mixed, engine="vllm", connector=Connector.NIXL) == ()
    said = r"no connector nixl_push; it has \['ascend', 'mooncake', 'nixl'\]"
    with pytest.raises(ValueError, match=said):
        refusals(between(), engine="sglang", connector=Connector.NIXL_PUSH)
    vllm = [release for release in RELEASES if release.name == "vllm"]
    assert {row.connector for release in vllm for row in release.transfers} == set(Connector)


def test_vllm_reads_no_copies_into_a_narrower_decode() -> None:
    (line,) = refusals(between(wide(16), wide(4)), engine="vllm", connector=Connector.NIXL)
    assert "wider prefill exceeds 8 key-value heads" in line
    assert refusals(between(wide(4), wide(16)), engine="vllm", connector=Connector.NIXL) == ()
    (line,) = refusals(between(wide(4), wide(16)), engine="vllm", connector=Connector.NIXL_PUSH)
    assert "wider decode exceeds 8" in line
    assert refusals(between(nhd(16), nhd(4)), engine="sglang", connector=Connector.NIXL) == ()


@each_row(
    ("prefill", "decode", "is_hybrid", "said"),
    [
        (wide(4), wide(4, page_tokens=64), False, ""),
        (wide(4, page_tokens=64), wide(4), False, "prefill's must divide decode's"),
        (wide(4), wide(4, page_tokens=24), False, "prefill's must divide decode's"),
        (wide(4), wide(4, page_tokens=64), True, "a hybrid model forbids"),
        (wide(4), wide(4, page_tokens=64, uses_host_buffer=True), False, "a host buffer forbids"),
        (wide(8), wide(4, page_tokens=64), False, "a wider prefill forbids"),
        (wide(4), wide(8, page_tokens=64), False, ""),
    ],
)
def test_page_sizes_that_vllm_reads(
    prefill: KvSide, decode: KvSide, is_hybrid: bool, said: str
) -> None:
    lines = refusals(
        between(prefill, decode, is_hybrid=is_hybrid), engine="vllm", connector=Connector.NIXL
    )
    assert (len(lines) == 0) if not said else (said in lines[0])


@each_row(
    ("engine", "connector"),
    [
        ("sglang", Connector.NIXL),
        ("sglang", Connector.MOONCAKE),
        ("vllm", Connector.MOONCAKE),
        ("vllm", Connector.NIXL_PUSH),
    ],
)
def test_everyone_else_needs_equal_pages(engine: str, connector: Connector) -> None:
    pair = between(nhd(4), nhd(4, page_tokens=64))
    (line,) = refusals(pair, engine=engine, connector=connector)
    assert "page sizes 16 (prefill) and 64 (decode) differ; give both sides one" in line


@each_row(
    ("engine", "connector", "one", "other", "said"),
    [
        ("vllm", Connector.NIXL, 2, 1, "both must be 1"),
        ("vllm", Connector.NIXL_PUSH, 2, 1, ""),
        ("vllm", Connector.NIXL_PUSH, 2, 2, "decode's must be 1"),
        ("vllm", Connector.MOONCAKE, 2, 4, ""),
        ("sglang", Connector.NIXL, 4, 1, ""),
        ("sglang", Connector.NIXL, 4, 4, ""),
        ("sglang", Connector.MOONCAKE, 4, 2, "decode's must be 1 or prefill's"),
    ],
)
def test_pipelines_that_go_together(
    engine: str, connector: Connector, one: int, other: int, said: str
) -> None:
    pair = between(replace(SIDE, pipeline=one), replace(SIDE, pipeline=other))
    lines = refusals(pair, engine=engine, connector=connector)
    assert (len(lines) == 0) if not said else (said in lines[0])


def test_hybrid_models_have_rules_of_their_own() -> None:
    wider = between(wide(2), wide(4), is_hybrid=True)
    (line,) = refusals(wider, engine="vllm", connector=Connector.NIXL_PUSH)
    assert "needs decode's to be prefill's at most" in line
    piped = between(nhd(2, pipeline=2), nhd(4), is_hybrid=True)
    (line,) = refusals(piped, engine="sglang", connector=Connector.MOONCAKE)
    assert "one tensor degree, or no pipeline" in line


@each_row(("engine", "dtype", "layout"), [("vllm", "nvfp4", "hnd"), ("sglang", "mxfp8", "nhd")])
def test_types_with_separate_scales_cannot_be_split(engine: str, dtype: str, layout: str) -> None:
    one, other = (wide(tensor, dtype=dtype, layout=layout) for tensor in (2, 4))
    (line,) = refusals(between(one, other), engine=engine, connector=Connector.MOONCAKE)
    assert f"heads of a {dtype} cache cannot be split" in line
    assert refusals(between(one, one), engine=engine, connector=Connector.MOONCAKE) == ()


@each_row("cache", CacheKind)
def test_tensorrt_llm_wants_one_page_size_and_re_slices_the_rest(cache: CacheKind) -> None:
    requested = {"engine": "trtllm", "connector": Connector.NIXL}
    pages = between(wide(4), wide(4, page_tokens=32), cache=cache)
    (line,) = refusals(pages, **requested)  # type: ignore[arg-type]  # as the function has them
    assert "page sizes 16 (prefill) and 32 (decode) differ" in line
    degrees = between(wide(2, pipeline=4), wide(8, pipeline=2), cache=cache)
    assert refusals(degrees, **requested) == ()  # type: ignore[arg-type]  # likewise


def test_states_move_where_a_connector_knows_their_kind() -> None:
    mamba2 = replace(between(is_hybrid=True), states=LinearName.MAMBA2)
    delta = replace(mamba2, states=LinearName.GATED_DELTA)
    cannot = "the states of mamba2 layers cannot be moved; plan aggregated instances"
    for engine, connector, pair, said in (
        ("vllm", Connector.NIXL, mamba2, ()),
        ("vllm", Connector.MOONCAKE, delta, ()),
        ("vllm", Connector.MOONCAKE, mamba2, (f"vllm 0.33.0 mooncake: {cannot}",)),
        ("trtllm", Connector.NIXL, mamba2, ()),
        ("trtllm", Connector.MOONCAKE, mamba2, (f"trtllm 1.3.0rc27 mooncake: {cannot}",)),
    ):
        assert refusals(pair, engine=engine, connector=connector) == said
    one, other = (nhd(4) for _ in range(2))
    pair = replace(mamba2, prefill=one, decode=other)
    assert refusals(pair, engine="sglang", connector=Connector.NIXL) == ()
    pushed = replace(mamba2, prefill=wide(4, pipeline=2))
    assert refusals(pushed, engine="vllm", connector=Connector.NIXL_PUSH) == (
        "vllm 0.33.0 nixl_push: states cannot be moved between pipelines; give both sides 1 stage,"
        " not 2",
    )


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
    model = example_model(folder)
    assert kv_refusals.has_different_caches(model) == is_hybrid


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
