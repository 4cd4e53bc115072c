"""Pages of pools that hand caches to each other."""

from pathlib import Path

from tests.tuner.serve_specs import serve_spec
from tuner.goals.serve_plan import price_serving_pool
from tuner.goals.serve_spec import read_serve_spec
from tuner.search.serve.pages import page_by_pool

LINK = "{between: [h100, b200], bandwidth: 400Gbit/s, latency: 10us}"


def pages(folder: Path, *, engine: str, model: str, links: str) -> dict[str, int]:
    pools = ", ".join(
        f"{{name: {name}, device: {name}-sxm, nodes: 1, devices_per_node: 8}}"
        for name in ("h100", "b200")
    )
    spec = read_serve_spec(serve_spec(folder, engine=engine, model=model, pools=pools, links=links))
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
