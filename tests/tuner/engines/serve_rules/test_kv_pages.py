"""Pages that launchers leave to the engine, release by release."""

from tests.rows import each_row
from tuner.devices.datasheet import Generation
from tuner.engines.serve_capabilities import engine_manifest
from tuner.engines.serve_rules.kv_cache import CacheKind, KvPages
from tuner.spec.serving.goal import Engine

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
    legal = pages.legal(cache=cache, generation=generation, dtype=dtype)
    assert legal is not None
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
