"""Pages that launchers leave to the engine, release by release."""

import pytest

from tuner.devices.datasheet import Generation
from tuner.spec.serving.kv_connectors import CacheKind
from tuner.spec.serving.kv_pages import page_tokens


@pytest.mark.parametrize(
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
        ("sglang", CacheKind.GROUPED, Generation.CDNA3, "bf16", None),
        ("trtllm", CacheKind.GROUPED, Generation.HOPPER, "bf16", None),
    ],
)
def test_pages_are_those_of_the_default_kernels(
    engine: str, cache: CacheKind, generation: Generation, dtype: str, tokens: int | None
) -> None:
    found = page_tokens(engine=engine, cache=cache, generation=generation, dtype=dtype)
    assert found == tokens
