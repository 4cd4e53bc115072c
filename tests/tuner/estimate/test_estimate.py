from collections.abc import Callable
from pathlib import Path

import pytest

from tests.expect import present
from tests.tuner.estimate.conftest import predict
from tuner.costs.train.calibration import GENERIC_BAND
from tuner.engines.deepspeed import read as deepspeed
from tuner.engines.megatron_lm import read as megatron
from tuner.engines.torchtitan import read as torchtitan
from tuner.errors import SpecError, UnknownDeviceError
from tuner.estimate.changes import LEAST_GAIN_RATIO
from tuner.estimate.estimate import estimate
from tuner.estimate.records import Estimate
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.routing import RoutingRecord
from tuner.spec.search import Search
from tuner.spec.spec import Spec

LAUNCHES = Path(__file__).parent / "launches"
MakeSpec = Callable[..., Spec]
DENSE = (
    "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py --bf16 --micro-batch-size 1 "
    "--global-batch-size 64 --seq-length 4096 --hidden-dropout 0 --attention-dropout 0 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
)


def estimated(flags: str, spec: Spec, *, launch: str = DENSE) -> Estimate:
    return estimate(spec, megatron.read(launch + flags, source="run.sh"))


@pytest.fixture(scope="module")
def mixtral(spec_of: MakeSpec) -> Estimate:
    text = (LAUNCHES / "mixtral.sh").read_text()
    return estimate(spec_of("mixtral-8x7b", nodes=8), megatron.read(text, source="mixtral.sh"))


def test_time_tokens_and_utilisation_are_views_of_one_number(mixtral: Estimate) -> None:
    tokens = 256 * 4096

    assert mixtral.tokens_per_s_per_device * mixtral.step_time_s * 64 == pytest.approx(tokens)
    low, high = mixtral.step_time_s_band
    assert (low, high) == pytest.approx([mixtral.step_time_s * side for side in GENERIC_BAND])
    slow, fast = mixtral.tokens_per_s_per_device_band
    assert slow < mixtral.tokens_per_s_per_device < fast
    # Llama-like counts by hand: Mixtral has 12.6 G active weights outside the embedding, 6 FLOP
    # each, and 6 * 32 layers * 4096 * 2 attended-token-halves of attention: about 79 GFLOP a token.
    per_token = 6 * 12.6e9 + 6 * 32 * 4096 * 4096
    achieved = per_token * mixtral.tokens_per_s_per_device
    use = mixtral.utilisation

    assert use.mfu_ratio == pytest.approx(achieved / 989.4e12, rel=0.02)
    assert use.hfu_ratio == use.mfu_ratio
    assert use.megatron_flop_per_s_per_device == pytest.approx(achieved, rel=0.02)
    assert use.peak_name.startswith("h100-sxm, dense bf16")


def test_the_simulated_schedule_agrees_with_the_closed_form(
    mixtral: Estimate, spec_of: MakeSpec
) -> None:
    assert mixtral.played_step_time_s == pytest.approx(mixtral.step_time_s, rel=0.03)
    result = estimated("", spec_of("llama-3.1-8b", nodes=1))

    assert result.played_step_time_s == pytest.approx(result.step_time_s, rel=1e-9)


def test_shares_of_the_step_and_memory_are_stated_by_rank(mixtral: Estimate) -> None:
    shares = mixtral.exposed.model_dump().values()

    assert all(0.0 <= share < 1.0 for share in shares)
    assert sum(shares) < 1.0
    # Four ranks, 16 micro-batches: 3 of 19 slots are empty at least.
    assert mixtral.exposed.bubble_ratio > 0.1
    assert mixtral.exposed.tensor_ratio == 0.0
    assert mixtral.exposed.all_to_all_ratio > 0.0
    totals = [rank.total_bytes for rank in mixtral.memory]

    assert len(totals) == 4
    assert mixtral.peak_memory_bytes == max(totals)
    assert totals[mixtral.fullest_pipeline_rank] == max(totals)
    assert [rank.layers for rank in mixtral.memory] == [8, 8, 8, 8]
    # 1F1B keeps most micro-batches in flight on the first rank.
    assert mixtral.memory[0].activation_bytes > mixtral.memory[3].activation_bytes


def test_the_smallest_change_is_one_knob_can_be_launched_and_does_what_was_predicted(
    mixtral: Estimate, spec_of: MakeSpec
) -> None:
    change = present(mixtral.smallest_change)

    assert len(change.what) == 1
    assert change.gain_ratio > LEAST_GAIN_RATIO
    assert change.step_time_s < mixtral.step_time_s
    assert change.peak_memory_bytes <= mixtral.memory_limit_bytes
    assert change == mixtral.changes[0]
    gains = [one.gain_ratio for one in mixtral.changes]
    assert gains == sorted(gains, reverse=True)
    text = (LAUNCHES / "mixtral.sh").read_text()
    kept = [line for line in change.lines if not line.startswith("remove")]
    assert kept == list(change.lines)
    # The last of two equal flags counts, so appending the lines makes the change.
    changed = text.replace('"$@"', " ".join(kept))
    again = estimate(spec_of("mixtral-8x7b", nodes=8), megatron.read(changed, source="mixtral.sh"))

    assert again.decision == change.decision
    assert again.step_time_s == pytest.approx(change.step_time_s)
    if mixtral.best_pair is not None and mixtral.smallest_change is not None:
        assert mixtral.best_pair.step_time_s < mixtral.smallest_change.step_time_s
        assert len(mixtral.best_pair.what) == 2


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def test_recomputation_costs_time_saves_memory_and_counts_in_hfu_only(spec_of: MakeSpec) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1)
    without, with_full = estimated("", spec), estimated(FULL, spec)

    assert with_full.step_time_s > without.step_time_s
    assert with_full.peak_memory_bytes < without.peak_memory_bytes
    assert with_full.exposed.recompute_ratio > without.exposed.recompute_ratio == 0.0
    use = with_full.utilisation
    # One more forward pass of the layers: just below four thirds.
    assert 1.25 < use.hfu_ratio / use.mfu_ratio < 4 / 3


def test_changes_undo_what_is_in_vain_or_does_not_fit(spec_of: MakeSpec) -> None:
    result = estimated(f"{FULL} --seq-length 2048", spec_of("llama-3.1-8b", nodes=1))

    assert present(result.smallest_change).lines == (
        "remove --recompute-granularity",
        "remove --recompute-method",
        "remove --recompute-num-layers",
    )
    result = estimated("--micro-batch-size 8", spec_of("llama-3.1-8b", nodes=1))

    assert not result.fits
    assert result.peak_memory_bytes > result.memory_limit_bytes
    assert present(result.smallest_change).peak_memory_bytes <= result.memory_limit_bytes


MIXTRAL = megatron.read((LAUNCHES / "mixtral.sh").read_text(), source="mixtral.sh")


def test_the_risk_of_running_out_uses_the_whole_device_memory(spec_of: MakeSpec) -> None:
    """What a plan may use is its own limit and changes no chance; what there is does."""
    spec = spec_of("mixtral-8x7b", nodes=8)
    (pool,) = spec.cluster.pools

    def result(**changes: float) -> Estimate:
        cluster = Cluster(pools=(pool.model_copy(update=changes),))
        return predict(spec.model_copy(update={"cluster": cluster}), MIXTRAL)

    usual, careful = result(), result(usable_memory_ratio=0.5)
    peak = usual.peak_memory_bytes
    assert careful.out_of_memory_probability == usual.out_of_memory_probability
    assert careful.memory_limit_bytes < careful.memory_capacity_bytes == usual.memory_capacity_bytes
    chances = [
        result(memory_per_device=int(share * peak)).out_of_memory_probability
        for share in (0.8, 1.0, 1.2, 2.0)
    ]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.95
    assert chances[-1] < 0.01
    assert 0.0 <= usual.out_of_memory_at_start_probability <= usual.out_of_memory_probability


def test_limits_of_the_spec_hold_for_changes_too(spec_of: MakeSpec, mixtral: Estimate) -> None:
    spec = spec_of("mixtral-8x7b", nodes=8)
    limits = Search(virtual_pipeline_model_parallel_size=(1,), pipeline_model_parallel_size=(4,))
    result = estimate(spec.model_copy(update={"search": limits}), MIXTRAL)
    changes = [*result.changes, *([result.best_pair] if result.best_pair else [])]

    assert all(one.decision.virtual_pipeline_model_parallel_size == 1 for one in changes)
    assert all(one.decision.pipeline_model_parallel_size == 4 for one in changes)


def test_a_slower_network_exposes_more_of_data_parallelism(spec_of: MakeSpec) -> None:
    text = DENSE.replace("--nnodes 1", "--nnodes 8")
    fast = spec_of("llama-3.1-8b", nodes=8)
    (pool,) = fast.cluster.pools
    slow_pool = pool.model_copy(update={"nic": 2e9})
    slow = fast.model_copy(update={"cluster": Cluster(pools=(slow_pool,))})

    found_fast, found_slow = (estimated("", spec, launch=text) for spec in (fast, slow))
    assert found_slow.exposed.data_ratio > found_fast.exposed.data_ratio > 0.0


def test_recorded_imbalance_makes_a_step_longer(spec_of: MakeSpec, mixtral: Estimate) -> None:
    spec = spec_of(
        "mixtral-8x7b", nodes=8, routing={"path": Path("routing.json"), "phase": "steady"}
    )
    uneven = (0.3, *[0.1] * 7)
    record = RoutingRecord(
        name="uneven", num_experts=8, top_k=2, layer_ids=(0,), load_ratios=(uneven,)
    )
    result = predict(spec.model_copy(update={"routing": record}), MIXTRAL)

    assert result.step_time_s > mixtral.step_time_s
    assert not any("balanced" in note for note in result.notes)
    assert any("balanced" in note for note in mixtral.notes)


def test_a_link_matrix_changes_no_price_and_that_is_said(
    spec_of: MakeSpec, mixtral: Estimate
) -> None:
    spec = spec_of("mixtral-8x7b", nodes=8)
    (pool,) = spec.cluster.pools
    named = pool.model_copy(update={"link_matrix": Path("links.csv")})
    spec = spec.model_copy(update={"cluster": Cluster(pools=(named,))})
    result = predict(spec, MIXTRAL)
    assert result.step_time_s == mixtral.step_time_s
    assert any(note.startswith("link_matrix has no effect here") for note in result.notes)


def test_every_engine_is_priced(spec_of: MakeSpec, mixtral: Estimate) -> None:
    titan = torchtitan.read((LAUNCHES / "llama3-70b.toml").read_text(), source="t.toml")
    small = torchtitan.read((LAUNCHES / "deepseek-16b.toml").read_text(), source="d.toml")
    zero = deepspeed.read((LAUNCHES / "zero3.json").read_text(), source="ds.json")
    bridge = megatron.read_yaml((LAUNCHES / "llama.yaml").read_text(), source="llama.yaml")
    deepseek = megatron.read((LAUNCHES / "deepseek-v3.sh").read_text(), source="deepseek-v3.sh")

    for launch, spec in (
        (titan, spec_of("llama-3.1-70b", nodes=8)),
        (small, spec_of("deepseek-v2-lite", nodes=2)),
        (zero, spec_of("llama-3.1-8b", nodes=8)),
        (bridge, spec_of("llama-3.1-405b", nodes=128)),
        (deepseek, spec_of("deepseek-v3", nodes=128)),
    ):
        result = predict(spec, launch)
        assert 0.01 < result.utilisation.mfu_ratio < 0.9
        assert result.engine == launch.engine
        assert result.decision.num_devices == result.devices
        assert Estimate.model_validate_json(result.model_dump_json()) == result
    assert Estimate.model_validate_json(mixtral.model_dump_json()) == mixtral


def test_a_pipeline_that_runs_empty_more_often_waits_more(spec_of: MakeSpec) -> None:
    text = (LAUNCHES / "deepseek-16b.toml").read_text()
    spec = spec_of("deepseek-v2-lite", nodes=2)
    often = predict(spec, torchtitan.read(text, source="t.toml"))
    once = predict(
        spec,
        torchtitan.read(
            text.replace("local_batch_size = 8", "local_batch_size = 64"), source="t.toml"
        ),
    )

    assert (often.rounds, once.rounds) == (8, 1)
    assert often.step_time_s > once.step_time_s
    assert often.exposed.bubble_ratio > once.exposed.bubble_ratio


def test_a_launch_is_priced_on_one_pool_of_a_described_device(spec_of: MakeSpec) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1)
    measured = Pool(name="pool", profile=Path("profile"), nodes=1, devices_per_node=8)
    unknown = Pool(name="pool", device="h1000", nodes=1, devices_per_node=8)

    with pytest.raises(SpecError, match="has no 'device'"):
        estimated("", spec.model_copy(update={"cluster": Cluster(pools=(measured,))}))
    with pytest.raises(UnknownDeviceError):
        estimated("", spec.model_copy(update={"cluster": Cluster(pools=(unknown,))}))
    pools = tuple(
        Pool(name=name, device="h100-sxm", nodes=1, devices_per_node=8) for name in ("a", "b")
    )
    with pytest.raises(SpecError, match="one pool"):
        estimated("", spec.model_copy(update={"cluster": Cluster(pools=pools)}))
