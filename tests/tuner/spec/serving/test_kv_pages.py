"""Pages that launchers leave to the engine, release by release."""

from tests.rows import each_row
from tuner.devices.datasheet import Generation
from tuner.spec.serving.kv_connectors import CacheKind
from tuner.spec.serving.kv_pages import legal_pages, page_tokens

USUAL = (1, 16, 32, 64, 128)


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
        ("trtllm", CacheKind.GROUPED, Generation.CDNA3, "bf16", None),
        ("trtllm", CacheKind.GROUPED, Generation.HOPPER, "bf16", 32),
        ("trtllm", CacheKind.LATENT, Generation.HOPPER, "bf16", 64),
        ("trtllm", CacheKind.LATENT, Generation.BLACKWELL, "fp8", 32),
    ],
)
def test_pages_are_those_of_the_default_kernels(
    engine: str, cache: CacheKind, generation: Generation, dtype: str, tokens: int | None
) -> None:
    pages = page_tokens(engine=engine, cache=cache, generation=generation, dtype=dtype)
    assert pages == tokens


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
        ("trtllm", CacheKind.GROUPED, Generation.ASCEND, "bf16", ()),
        ("trtllm", CacheKind.GROUPED, Generation.HOPPER, "bf16", (32, 64)),
        ("trtllm", CacheKind.LATENT, Generation.HOPPER, "bf16", (64,)),
    ],
)
def test_pages_that_may_be_stated_are_those_of_the_preferred_kernels(
    engine: str, cache: CacheKind, generation: Generation, dtype: str, tokens: tuple[int, ...]
) -> None:
    rule = {"engine": engine, "cache": cache, "generation": generation, "dtype": dtype}
    legal = legal_pages(**rule)  # type: ignore[arg-type]  # as the function has them
    supported = () if legal is None else tuple(page for page in USUAL if legal.holds(page))
    assert supported == tokens
    default = page_tokens(**rule)  # type: ignore[arg-type]  # likewise
    assert default is None or default in tokens


def test_pages_of_an_unknown_device_suit_all_devices() -> None:
    pages = legal_pages(engine="vllm", cache=CacheKind.LATENT, generation=None, dtype="fp8")
    assert pages is not None
    assert pages.holds(16)
    assert not pages.holds(24)
    assert (
        legal_pages(engine="sglang", cache=CacheKind.LATENT, generation=None, dtype="fp8") is None
    )
