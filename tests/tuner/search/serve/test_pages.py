"""Pages of pools that hand caches to each other."""

from pathlib import Path

from tuner.goals.serve_plan import price_serving_pool
from tuner.search.serve.pages import page_by_pool
from tuner.spec.serving.read import read_serve_spec

MODELS = Path(__file__).parents[4] / "examples" / "models"
LINK = "{between: [h100, b200], bandwidth: 400Gbit/s, latency: 10us}"


def pages(folder: Path, *, engine: str, model: str, links: str) -> dict[str, int]:
    path = folder / "spec.yaml"
    pools = ", ".join(
        f"{{name: {name}, device: {name}-sxm, nodes: 1, devices_per_node: 8}}"
        for name in ("h100", "b200")
    )
    path.write_text(
        "schema_version: 1\n"
        f"model: {MODELS / model}\n"
        f"cluster: {{pools: [{pools}], links: [{links}]}}\n"
        "goal:\n"
        "  kind: serve\n"
        f"  engine: {{name: {engine}}}\n"
        "  traffic: {rate: 1/s, input_tokens: 1000, output_tokens: 100}\n"
    )
    spec = read_serve_spec(path)
    serving_pools = tuple(price_serving_pool(pool, ()) for pool in spec.cluster.pools)
    return dict(page_by_pool(spec, serving_pools))


def test_pools_with_a_link_get_the_smallest_page_that_both_take(tmp_path: Path) -> None:
    # SGLang: 1 token on Hopper, 64 on Blackwell, whose kernels for MLA take 32 and 64.
    found = pages(tmp_path, engine="sglang", model="deepseek-v3", links=LINK)
    assert found == {"h100": 32, "b200": 32}
    # vLLM: 16 on Hopper, multiples of 32 on Blackwell.
    assert pages(tmp_path, engine="vllm", model="deepseek-v3", links=LINK) == {"h100": 32}


def test_pools_that_nothing_joins_or_that_agree_keep_their_own(tmp_path: Path) -> None:
    assert pages(tmp_path, engine="sglang", model="deepseek-v3", links="") == {}
    assert pages(tmp_path, engine="vllm", model="mixtral-8x7b", links=LINK) == {}
