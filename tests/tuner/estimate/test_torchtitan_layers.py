"""Seconds of torchtitan's layers with experts, eager and compiled, beside what others measured."""

from collections.abc import Callable

import pytest

from tests.rows import each_row
from tests.tuner.estimate.conftest import predict
from tuner.engines.torchtitan.read import read
from tuner.errors import SpecError
from tuner.estimate.estimate import shipped_residuals
from tuner.estimate.records import Estimate
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.spec import Spec

MakeSpec = Callable[..., Spec]
LITE = "deepseek-v2-lite"


def launched(
    spec: Spec,
    *,
    batch: int,
    expert: int,
    mode: str = "selective",
    compiled: tuple[str, ...] = ("loss",),
    dispatcher: str = "standard",
    sections: str = "",
) -> Estimate:
    components = ", ".join(f'"{name}"' for name in compiled)
    backend = f'expert_parallel_comm_backend = "{dispatcher}"' if dispatcher else ""
    text = (
        f"[training]\nlocal_batch_size = {batch}\nseq_len = {spec.goal.sequence_length}\n"
        f"[parallelism]\nexpert_parallel_degree = {expert}\n"
        f"{backend}\n"
        f'[activation_checkpoint]\nmode = "{mode}"\nselective_ac_option = "op"\n'
        f"[compile]\nenable = true\ncomponents = [{components}]\n{sections}"
    )
    return predict(spec, read(text, source="t.toml"), residuals=shipped_residuals())


@each_row(
    ("device", "batch", "mode", "tokens_per_s"),
    (
        ("h100-sxm", 4, "selective", 11_600.0),
        ("b200-sxm", 4, "selective", 17_400.0),
        ("b200-sxm", 4, "none", 20_700.0),
        ("h100-96gb-hbm2e", 8, "selective", 8_667.0),
    ),
)
def test_eager_layers_take_what_others_measured(
    spec_of: MakeSpec, device: str, batch: int, mode: str, tokens_per_s: float
) -> None:
    """DeepSeek-V3 16B has the shape of DeepSeek-V2-Lite.

    Tokens/s of a device. [P] 8 H100 80 GB: torchtitan#1789; 8 B200: shares of 2,250 TFLOP/s at
    17.4 GFLOP a token, torchtitan#1993; 8 H100 96 GB: torchtitan#1610, whose router is untrained.
    """
    spec = spec_of(LITE, nodes=1, device=device, global_batch_size=8 * batch)
    found = launched(spec, batch=batch, expert=8, mode=mode)
    assert 0.8 < tokens_per_s / found.tokens_per_s_per_device < 1.1, device
    low, high = found.tokens_per_s_per_device_band
    assert low < tokens_per_s < high


def test_compiled_layers_are_faster_than_eager_ones(spec_of: MakeSpec) -> None:
    """[P] 16 % of the peak with eager layers, 17 to 18 with compiled ones: torchtitan#1993."""
    spec = spec_of(LITE, nodes=1, device="b200-sxm", global_batch_size=32)
    eager = launched(spec, batch=4, expert=8, mode="none")
    compiled = launched(spec, batch=4, expert=8, mode="none", compiled=("model", "loss"))
    assert 1.05 < eager.step_time_s / compiled.step_time_s < 1.45
    # Dense layers: 2.84 and 2.46 s (benchmarks/llama3_h100_202412_torchtitan.md).
    dense = spec_of("llama-3.1-8b", nodes=1, device="h100-96gb-hbm2e", sequence_length=8192)
    both = [
        launched(dense, batch=2, expert=1, compiled=names).step_time_s
        for names in (("loss",), ("model", "loss"))
    ]
    assert 1.05 < both[0] / both[1] < 1.2


def test_kernels_wait_for_counts_and_checkpoints_repeat_grouped_gemms(spec_of: MakeSpec) -> None:
    spec = spec_of(LITE, nodes=1, global_batch_size=32)
    waiting = {
        (expert, dispatcher): launched(
            spec, batch=4, expert=expert, dispatcher=dispatcher
        ).breakdown_s.get("host", 0.0)
        for expert, dispatcher in ((8, "standard"), (8, "deepep"), (1, "standard"))
    }
    assert waiting[8, "standard"] == pytest.approx(waiting[8, "deepep"], rel=0.05)
    assert waiting[8, "standard"] > 0.1 > waiting[1, "standard"]
    assert launched(spec, batch=4, expert=8, compiled=("model", "loss")).breakdown_s["host"] < 0.05
    parts = {
        mode: launched(spec, batch=4, expert=1, mode=mode).breakdown_s["recompute"]
        for mode in ("selective", "full")
    }
    assert 0.6 < parts["selective"] / parts["full"] < 0.95


def test_layers_of_transformers_with_experts_stay_eager(spec_of: MakeSpec) -> None:
    """Qwen3-30B under the experiment of torchtitan#2679: 2,817 tokens/s, 78.6 GiB."""
    spec = spec_of(
        "qwen3-30b-a3b",
        nodes=1,
        device="h100-96gb-hbm2e",
        sequence_length=2048,
        global_batch_size=16,
    )
    own = '[model]\nname = "transformers_modeling_backend"\n'
    both = ("model", "loss")
    found, of_titan = (
        launched(spec, batch=2, expert=8, compiled=both, sections=text) for text in (own, "")
    )
    assert 0.7 < found.step_time_s / 1.454 < 1.3
    assert found.peak_memory_bytes / 2**30 == pytest.approx(78.6, rel=0.1)
    assert of_titan.step_time_s < 0.6 * found.step_time_s


def test_hybridep_runs_over_whole_buffers_or_waits_for_the_host(spec_of: MakeSpec) -> None:
    """4 GB300, all layers checkpointed: 19,558 tokens/s, 74.7 GiB (torchtitan#3659)."""
    spec = spec_of(LITE, nodes=1, device="gb300-nvl72", global_batch_size=16)
    pool = Pool(name="pool", device="gb300-nvl72", nodes=1, devices_per_node=4)
    spec = spec.model_copy(update={"cluster": Cluster(pools=(pool,))})
    own = '[model]\nmoe_comm_backend = "hybridep"\n'

    def found(said: str) -> Estimate:
        return launched(spec, batch=4, expert=4, mode="full", dispatcher="", sections=own + said)

    whole, half = (found(f"non_blocking_capacity_factor = {share}\n") for share in (1.0, 0.5))
    low, high = whole.step_time_s_band
    assert low < 16_384 / 19_558 < high
    assert whole.peak_memory_bytes / 2**30 == pytest.approx(74.7, rel=0.05)
    assert half.step_time_s < whole.step_time_s
    assert half.peak_memory_bytes < whole.peak_memory_bytes
    asking = found("")
    assert asking.breakdown_s["host"] > 10.0 * whole.breakdown_s.get("host", 0.0)
    assert asking.peak_memory_bytes <= half.peak_memory_bytes
    for share in ("0.0", "2.0", "true", '"much"'):
        with pytest.raises(SpecError, match="not above 0 and at most 1"):
            found(f"non_blocking_capacity_factor = {share}\n")
