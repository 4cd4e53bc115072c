"""What launches take of their hosts' memory, and whether it is there."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.expect import present
from tests.printed import unwrapped
from tests.tuner.estimate.conftest import predict
from tuner.cli.estimate_text import estimate_text
from tuner.engines.deepspeed import read as deepspeed
from tuner.engines.megatron_lm import read as megatron
from tuner.engines.torchtitan import read as torchtitan
from tuner.estimate.estimate import estimate
from tuner.estimate.records import Estimate
from tuner.spec.accounting import num_parameters
from tuner.spec.cluster import Cluster, Host
from tuner.spec.spec import Spec

LAUNCHES = Path(__file__).parent / "launches"
DENSE = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 --micro-batch-size 1 --seq-length 4096"
    " --global-batch-size 64 --hidden-dropout 0 --attention-dropout 0 --use-distributed-optimizer"
)
OFFLOADED = "--optimizer-cpu-offload --use-precision-aware-optimizer"
IN_BACKGROUND = "--save /c --save-interval 80 --async-save --use-persistent-ckpt-worker"
GIB = 2**30
MakeSpec = Callable[..., Spec]


def on_hosts(spec: Spec, host: Host | None) -> Spec:
    """Give the hosts of a spec some memory."""
    pool = spec.cluster.pools[0].model_copy(update={"host": host})
    return spec.model_copy(update={"cluster": Cluster(pools=(pool,))})


def megatron_on(spec: Spec, flags: str) -> Estimate:
    text = (LAUNCHES / "mixtral.sh").read_text()
    text = text.replace("--micro-batch-size", f"{flags} --micro-batch-size", 1)
    return predict(spec, megatron.read(text, source="mixtral.sh"))


def test_an_offloaded_optimizer_is_counted_and_checked(spec_of: MakeSpec) -> None:
    spec = spec_of("mixtral-8x7b", nodes=8)
    mean = num_parameters(spec.model) * 16 / 8
    unknown = megatron_on(spec, OFFLOADED)
    assert present(unknown.host_memory).node_bytes == pytest.approx(mean, rel=0.1)
    half = megatron_on(spec, f"{OFFLOADED} --optimizer-offload-fraction 0.5")
    assert present(half.host_memory).node_bytes == pytest.approx(
        present(unknown.host_memory).node_bytes / 2
    )
    assert unknown.fits
    assert "cluster.pools[].host" in unwrapped(estimate_text(unknown))
    for memory, fits in ((int(mean * 1.2), True), (64 * GIB, False)):
        result = megatron_on(on_hosts(spec, Host(memory=memory)), OFFLOADED)
        assert result.fits == fits
        assert ("DOES NOT FIT" in estimate_text(result)) != fits
    assert megatron_on(on_hosts(spec, Host(memory=64 * GIB)), "").host_memory is None


def test_moving_the_optimizer_is_advised_only_where_its_host_has_room(spec_of: MakeSpec) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1)
    launch = megatron.read(DENSE, source="run.sh")
    tight = int(predict(spec, launch).peak_memory_bytes * 0.97)
    for memory, advised in ((2048 * GIB, True), (64 * GIB, False)):
        hosts = on_hosts(spec, Host(memory=memory))
        pool = hosts.cluster.pools[0].model_copy(update={"memory_per_device": tight})
        hosts = hosts.model_copy(update={"cluster": Cluster(pools=(pool,))})
        result = estimate(hosts, launch)
        assert not result.fits
        said = [what for change in result.changes for what in change.what]
        assert any("keep the optimizer in host memory" in what for what in said) == advised


def test_copies_that_wait_for_a_write_count_whether_failures_are_stated_or_not(
    spec_of: MakeSpec,
) -> None:
    spec = spec_of("mixtral-8x7b", nodes=8)
    behind, waiting = (
        megatron_on(spec, flags) for flags in (IN_BACKGROUND, "--save /c --save-interval 80")
    )
    # 14 bytes a parameter over eight nodes.
    copies = num_parameters(spec.model) * 14 / 8
    assert present(behind.host_memory).parts == {
        "copies of checkpoints": pytest.approx(copies, rel=0.01)
    }
    assert waiting.host_memory is None
    assert not megatron_on(on_hosts(spec, Host(memory=64 * GIB)), IN_BACKGROUND).fits


def test_parameters_on_hosts_leave_the_device_and_are_copied_both_ways(spec_of: MakeSpec) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1)
    config = json.loads((LAUNCHES / "zero3.json").read_text())

    def deepspeed_of(zero: dict[str, object]) -> Estimate:
        text = json.dumps(config | {"zero_optimization": {"stage": 3, **zero}})
        return predict(spec, deepspeed.read(text, source="ds.json"))

    host = {"device": "cpu"}
    optimizer, both = (
        deepspeed_of({"offload_optimizer": host, **more}) for more in ({}, {"offload_param": host})
    )
    # DeepSpeed's own estimates are 16 and 18 bytes a parameter, before their buffers.
    parameters = num_parameters(spec.model)
    assert present(optimizer.host_memory).node_bytes == pytest.approx(16 * parameters, rel=0.01)
    assert present(both.host_memory).node_bytes == pytest.approx(18 * parameters, rel=0.01)
    assert both.peak_memory_bytes < optimizer.peak_memory_bytes - 2 * parameters // 8
    assert both.step_time_s > optimizer.step_time_s
    # FSDP's policy moves fp32 parameters, their gradients and the optimizer.
    on = "[training]\nenable_cpu_offload = true\n[parallelism]\ndata_parallel_shard_degree = -1\n"
    titan = predict(spec, torchtitan.read(on, source="job.toml"))
    assert present(titan.host_memory).node_bytes == pytest.approx(16 * parameters, rel=0.01)
