"""What serving launches take of their hosts' memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.printed import words_of
from tuner.errors import SpecError
from tuner.report.serving_estimate import serving_estimate_sections
from tuner.spec.cluster import Cluster, Host

Made = Callable[..., Any]
GIB = 2**30
VLLM = "vllm serve m -tp 4"
SGLANG = "python -m sglang.launch_server --model-path m --tp-size 4"


def test_caches_and_weights_on_hosts_are_counted_by_node(deployment: Made) -> None:
    for engine, text, gib in (
        # Of all ranks of an instance together; the others are a device's.
        ("vllm", f"{VLLM} --kv-offloading-size 256", 256.0),
        ("vllm", f"{VLLM} --swap-space 8 --cpu-offload-gb 4", 4 * 12.0),
        ("vllm", f"{VLLM} --kv-offloading-size 256 --kv-offloading-backend lmcache", 0.0),
        ("sglang", f"{SGLANG} --enable-hierarchical-cache --hicache-size 32", 4 * 32e9 / GIB),
        ("vllm", VLLM, 0.0),
        ("sglang", f"{SGLANG} --hicache-ratio 3", 0.0),
    ):
        result = deployment(engine=engine).estimate(text)
        found = 0 if result.host_memory is None else result.host_memory.node_bytes
        assert found == pytest.approx(gib * GIB), text
    for flags, ratio in (("", 2.0), ("--hicache-ratio 1.5", 1.5)):
        own = deployment(engine="sglang").estimate(f"{SGLANG} --enable-hierarchical-cache {flags}")
        assert own.host_memory.node_bytes == pytest.approx(4 * ratio * own.memory.cache_bytes)


def test_a_host_holds_what_its_launches_ask_for_or_they_do_not_fit(deployment: Made) -> None:
    made = deployment()
    asked = f"{VLLM} --kv-offloading-size 256"
    text = words_of(serving_estimate_sections(made.estimate(asked)))
    assert "cluster.pools[].host" in text
    for memory, instances, fits in ((320, 1, True), (320, 2, False), (128, 1, False)):
        pool = made.spec.cluster.pools[0].model_copy(update={"host": Host(memory=memory * GIB)})
        spec = replace(made.spec, cluster=Cluster(pools=(pool,)))
        result = type(made)(spec=spec).estimate(asked, instances=instances)
        assert result.fits == fits
        assert ("host memory: " in result.misfit) != fits


def test_sizes_that_are_none_are_refused(deployment: Made) -> None:
    for value, said in (("abc", "is not a number"), ("-4", "is outside 0..")):
        with pytest.raises(SpecError, match=said):
            deployment().estimate(f"{VLLM} --swap-space {value}")
