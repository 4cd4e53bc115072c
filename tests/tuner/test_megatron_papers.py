"""What Megatron-LM's two papers publish, worked out by the project's own code.

2104.04473 (Narayanan et al., SC 2021): parameters, FLOP per iteration, days of training, bubble,
and what its figures say about layouts. 2205.05198 (Korthikanti et al., 2022): model and hardware
FLOP utilisation of table 5. All on A100-80GB, 8 to a node, with eight 200 Gbit/s cards; peak
312e12.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from profilers.steps.config import LayerKind
from tests.expect import present
from tests.rows import each_row
from tests.tuner.simulate.played import idle_s, most_held
from tuner.backtest.measured import flop_per_token
from tuner.config.columns import Strategies
from tuner.config.shapes import Hardware, ModelShape, Stages
from tuner.costs.train.columns_of import hardware_of_pool
from tuner.costs.train.step import assemble, price_step
from tuner.costs.train.units import LayerCost, UnitCosts
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Generation
from tuner.faults.forecast import TrainingRun, forecast
from tuner.faults.reliability import Jobs
from tuner.prices.train.constants import Constants, GemmPrecision, Software, uncalibrated
from tuner.simulate.pipeline import Pipeline
from tuner.spec.accounting import num_parameters
from tuner.spec.cluster import Pool
from tuner.spec.model import Attention, ModelSpec

PEAK = 312e12
SEQUENCE, VOCAB = 2048, 51200
DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt:
    """A GPT as both papers have it: FFN of 4 h, learned positions, biases everywhere."""

    layers: int
    hidden: int
    heads: int

    @property
    def shape(self) -> ModelShape:
        """As the analytic model reads it."""
        return ModelShape(
            hidden=float(self.hidden),
            heads=float(self.heads),
            kv_heads=float(self.heads),
            head_dim=self.hidden / self.heads,
            value_dim=self.hidden / self.heads,
            dense_ffn=4.0 * self.hidden,
            is_gated=0.0,
            vocab=float(VOCAB),
            is_tied=1.0,
            dense_layers=float(self.layers),
        )

    @property
    def spec(self) -> ModelSpec:
        """As a spec holds it."""
        return ModelSpec(
            name="gpt",
            architecture="GPT",
            hidden_size=self.hidden,
            num_layers=self.layers,
            vocab_size=VOCAB,
            tie_word_embeddings=True,
            norm_epsilon=1e-5,
            rope_theta=1e4,
            max_position=SEQUENCE,
            attention=Attention(
                kind="gqa",
                num_heads=self.heads,
                num_kv_heads=self.heads,
                head_dim=self.hidden // self.heads,
                qkv_bias=True,
                output_bias=True,
            ),
            dense_ffn_size=4 * self.hidden,
            ffn_is_gated=False,
            ffn_bias=True,
            layers=(LayerKind.DENSE,) * self.layers,
            windowed=(False,) * self.layers,
            moe=None,
        )

    def flop(self, batch: int, *, recomputed: bool) -> float:
        """Operations of an iteration, attention over the full square as the papers count it.

        Full recomputation runs every layer's forward pass, a third of its operations, again.
        """
        whole = flop_per_token(self.shape, sequence=SEQUENCE, is_causal=False)
        layers = flop_per_token(replace(self.shape, vocab=0.0), sequence=SEQUENCE, is_causal=False)
        return batch * SEQUENCE * (whole + (layers / 3.0 if recomputed else 0.0))


# 2104.04473, table 1: billions of parameters, model, GPUs, batch, TFLOP/s per GPU, PFLOP/s in all.
TABLE_1 = (
    (1.7, Gpt(layers=24, hidden=2304, heads=24), 32, 512, 137, 4.4),
    (3.6, Gpt(layers=30, hidden=3072, heads=32), 64, 512, 138, 8.8),
    (7.5, Gpt(layers=36, hidden=4096, heads=32), 128, 512, 142, 18.2),
    (18.4, Gpt(layers=40, hidden=6144, heads=48), 256, 1024, 135, 34.6),
    (39.1, Gpt(layers=48, hidden=8192, heads=64), 512, 1536, 138, 70.8),
    (76.1, Gpt(layers=60, hidden=10240, heads=80), 1024, 1792, 140, 143.8),
    (145.6, Gpt(layers=80, hidden=12288, heads=96), 1536, 2304, 148, 227.1),
    (310.1, Gpt(layers=96, hidden=16384, heads=128), 1920, 2160, 155, 297.4),
    (529.6, Gpt(layers=105, hidden=20480, heads=128), 2520, 2520, 163, 410.2),
    (1008.0, Gpt(layers=128, hidden=25600, heads=160), 3072, 3072, 163, 502.0),
)
GPT_3 = Gpt(layers=96, hidden=12288, heads=96)
MT_NLG = TABLE_1[8][1]


@each_row("row", TABLE_1)
def test_parameters_are_the_published_ones_to_a_tenth_of_a_billion(
    row: tuple[float, Gpt, int, int, int, float],
) -> None:
    billions, gpt = row[0], row[1]
    # Learned positions and the biases of LayerNorm, which no model of the project has.
    positions = SEQUENCE * gpt.hidden
    norm_biases = (2 * gpt.layers + 1) * gpt.hidden
    counted = num_parameters(gpt.spec) + positions + norm_biases
    assert round(counted / 1e9, 1) == billions
    # P = 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)), which leaves the last norm out.
    h, n = gpt.hidden, gpt.layers
    formula = 12 * n * h**2 * (1 + 13 / (12 * h) + (VOCAB + SEQUENCE) / (12 * n * h))
    assert counted - 2 * h == pytest.approx(formula, rel=1e-12)


@each_row("row", TABLE_1)
def test_operations_of_an_iteration_are_equation_3(
    row: tuple[float, Gpt, int, int, int, float],
) -> None:
    _, gpt, gpus, batch, tera, peta = row
    h, n, s = gpt.hidden, gpt.layers, SEQUENCE
    expected = 96 * batch * s * n * h**2 * (1 + s / (6 * h) + VOCAB / (16 * n * h))
    assert gpt.flop(batch, recomputed=True) == pytest.approx(expected, rel=1e-12)
    plain = 72 * batch * s * n * h**2 * (1 + s / (6 * h) + VOCAB / (12 * n * h))
    assert gpt.flop(batch, recomputed=False) == pytest.approx(plain, rel=1e-12)
    # The table's last two columns agree with each other to the digits printed.
    assert gpus * tera / 1e3 == pytest.approx(peta, rel=5e-3)


def test_gpt_3_takes_34_days_on_1024_gpus() -> None:
    # Section 5.1: 8 T P / (n X) with 300e9 tokens and 140 TFLOP/s, attention's square left out.
    by_formula = 8 * 300e9 * num_parameters(GPT_3.spec) / (1024 * 140e12) / DAY
    assert by_formula == pytest.approx(34, abs=0.5)
    assert _days(GPT_3, gpus=1024, batch=1536, tera=140, tokens=300e9) == pytest.approx(34, abs=1.0)


@each_row(
    ("gpt", "gpus", "batch", "tera", "days"),
    [
        # Table 2: with pipeline parallelism, 300e9 tokens.
        (GPT_3, 384, 1536, 153, 84),
        (GPT_3, 768, 1536, 149, 43),
        (GPT_3, 1536, 1536, 141, 23),
        (MT_NLG, 560, 2240, 171, 156),
        (MT_NLG, 1120, 2240, 167, 80),
        (MT_NLG, 2240, 2240, 159, 42),
    ],
)
def test_days_of_training_are_those_of_table_2(
    gpt: Gpt, gpus: int, batch: int, tera: int, days: int
) -> None:
    found = _days(gpt, gpus=gpus, batch=batch, tera=tera, tokens=300e9)
    assert found == pytest.approx(days, abs=1.0)


def _days(gpt: Gpt, *, gpus: int, batch: int, tera: int, tokens: float) -> float:
    step_s = gpt.flop(batch, recomputed=True) / (gpus * tera * 1e12)
    run = TrainingRun(
        step_s=step_s, tokens_per_step=batch * SEQUENCE, tokens=tokens, devices_per_node=8
    )
    jobs = Jobs(devices=float(gpus), nodes=gpus / 8.0, checkpoint_bytes=0.0, writers=float(gpus))
    return present(forecast(run, jobs=jobs, reliability=None).wall_clock_s) / DAY


# 2205.05198, table 5: model, GPUs, batch, seconds, MFU, HFU in percent, both with sequence
# parallelism and selective recomputation; the last row is of section 6.3.
TABLE_5 = (
    (Gpt(layers=48, hidden=6144, heads=64), 8, 4, 1.10, 41.5, 43.7),
    (GPT_3, 64, 64, 13.75, 51.4, 52.8),
    (MT_NLG, 280, 280, 37.83, 56.0, 57.0),
    (Gpt(layers=128, hidden=25600, heads=160), 512, 512, 71.49, 56.3, 57.0),
    (MT_NLG, 2240, 2240, 39.15, 54.2, None),
)


@each_row("row", TABLE_5)
def test_utilisation_is_that_of_table_5(
    row: tuple[Gpt, int, int, float, float, float | None],
) -> None:
    gpt, gpus, batch, time_s, mfu, hfu = row
    could = time_s * gpus * PEAK
    # Times are printed to three digits: 1.10 s alone leaves 0.2 points open.
    assert 100 * gpt.flop(batch, recomputed=False) / could == pytest.approx(mfu, abs=0.25)
    if hfu is None:
        return
    # The published hardware FLOP count the whole attention core twice, s/(3h) for s/(6h).
    core = flop_per_token(gpt.shape, sequence=SEQUENCE, is_causal=False) - flop_per_token(
        gpt.shape, sequence=0, is_causal=False
    )
    hardware = gpt.flop(batch, recomputed=False) + batch * SEQUENCE * core
    assert 100 * hardware / could == pytest.approx(hfu, abs=0.25)


@each_row(("ranks", "chunks", "microbatches"), [(4, 1, 8), (8, 1, 8), (8, 4, 16)])
def test_the_bubble_is_p_minus_1_over_v_m(ranks: int, chunks: int, microbatches: int) -> None:
    # Section 2.2: of ideal compute, with every stage alike and nothing to send.
    per_stage = LayerCost(forward_s=1.0, backward_s=2.0)
    units = UnitCosts(
        dense=per_stage,
        moe=LayerCost(),
        mtp=LayerCost(),
        embedding=LayerCost(),
        head=LayerCost(),
        load_forward_s=0.0,
        load_backward_s=0.0,
    )
    strategies = Strategies(
        sequence=float(SEQUENCE),
        micro_batch=1.0,
        num_microbatches=np.array([float(microbatches)]),
        pipeline=np.array([float(ranks)]),
        virtual_pipeline=float(chunks),
    )
    constants = Constants(boundary_exposed_ratio=0.0)
    stages = _stages(ranks * chunks, layers=ranks * chunks, ends=False)
    price = assemble(GPT_3.shape, units, strategies, _a100s(), constants, stages)
    ideal_s = microbatches * chunks * 3.0
    assert np.asarray(price.bubble_s).tolist() == pytest.approx(
        [ideal_s * (ranks - 1) / (chunks * microbatches)]
    )


@each_row(("ranks", "chunks", "microbatches"), [(4, 1, 8), (8, 1, 32), (4, 2, 8), (8, 4, 16)])
def test_a_played_pipeline_has_the_published_bubble_and_activations(
    ranks: int, chunks: int, microbatches: int
) -> None:
    stages = ranks * chunks
    pipeline = Pipeline(
        forward_s_S=(1.0,) * stages,
        backward_s_S=(2.0,) * stages,
        num_devices=ranks,
        num_microbatches=microbatches,
    )
    # 2104.04473, section 2.2: every device idles (p - 1) / (v m) of its ideal compute.
    ideal_s = microbatches * chunks * 3.0
    assert idle_s(pipeline) == pytest.approx(
        [ideal_s * (ranks - 1) / (chunks * microbatches)] * ranks
    )
    # 2205.05198, section 4.2.3: the first device holds every layer once, p micro-batches of l / p,
    # and interleaved 1 + (p - 1) / (p v) times as much.
    times = 1.0 if chunks == 1 else 1.0 + (ranks - 1) / (ranks * chunks)
    assert most_held(pipeline)[0] == pytest.approx(stages * times)


def _a100s() -> Hardware:
    pool = Pool(name="a", device="a100-80gb-sxm", nodes=512, devices_per_node=8, nic=25e9)
    return hardware_of_pool(find_device("a100-80gb-sxm"), pool, precision=GemmPrecision.BF16)


def _stages(count: int, *, layers: int, ends: bool = True) -> Stages:
    dense_S1 = np.full((count, 1), layers / count)
    ends_S1 = np.eye(count, 1) * ends
    return Stages(
        dense_SC=dense_S1,
        moe_SC=0.0 * dense_S1,
        embedding_SC=ends_S1,
        head_SC=ends_S1[::-1],
        mtp_SC=0.0 * dense_S1,
    )


def _tera_per_gpu(
    gpt: Gpt, *, tensor: int, pipeline: int, data: int = 1, micro: int = 1, batch: int, v: int = 1
) -> float:
    """Predicted operations per second and GPU, in 1e12, counted as the paper counts them."""
    strategies = Strategies(
        sequence=float(SEQUENCE),
        micro_batch=float(micro),
        num_microbatches=np.array([batch / (data * micro)]),
        tensor=float(tensor),
        pipeline=np.array([float(pipeline)]),
        virtual_pipeline=float(v),
        data=float(data),
        sequence_parallel=0.0,
        zero_stage=0.0,
        recompute_full=1.0,
        has_flash_attention=0.0,
        dropout=0.1,
        overlap_gradients=0.0,
    )
    constants = uncalibrated(
        Generation.AMPERE, precision=GemmPrecision.BF16, software=Software.MEGATRON_2021
    )
    stages = _stages(pipeline * v, layers=gpt.layers)
    price = price_step(gpt.shape, strategies, _a100s(), constants, stages)
    step_s = float(np.asarray(price.step_s)[0])
    return gpt.flop(batch, recomputed=True) / step_s / (tensor * pipeline * data) / 1e12


@each_row("batch", [32, 128])
def test_tensor_parallelism_of_a_node_is_best_on_64_gpus(batch: int) -> None:
    # Figure 13: 162B, t p = 64; the peak is at t = 8, the size of a node.
    gpt = Gpt(layers=32, hidden=20480, heads=128)
    found = {
        t: _tera_per_gpu(gpt, tensor=t, pipeline=64 // t, batch=batch) for t in (2, 4, 8, 16, 32)
    }
    assert max(found, key=lambda t: found[t]) == 8


@each_row("batch", [32, 512])
def test_a_small_model_loses_with_every_pipeline_stage(batch: int) -> None:
    # Figure 14: 5.9B, t = 1, d = 64 / p.
    gpt = Gpt(layers=32, hidden=3840, heads=32)
    found = [
        _tera_per_gpu(gpt, tensor=1, pipeline=p, data=64 // p, batch=batch)
        for p in (2, 4, 8, 16, 32)
    ]
    assert found == sorted(found, reverse=True)


def test_the_best_micro_batch_is_two_sequences() -> None:
    # Figure 16: 91B, t = p = 8. With the large batch the model agrees; with the small one, where a
    # larger micro-batch costs bubble, it prefers 1 and sees 2 as close behind.
    gpt = Gpt(layers=32, hidden=15360, heads=128)
    found = {
        batch: {
            b: _tera_per_gpu(gpt, tensor=8, pipeline=8, micro=b, batch=batch) for b in (1, 2, 4, 8)
        }
        for batch in (128, 512)
    }
    assert max(found[512], key=lambda b: found[512][b]) == 2
    assert found[128][2] > 0.97 * max(found[128].values())
    assert found[128][2] > found[128][4] > found[128][8]


def test_interleaving_helps_and_less_so_with_larger_batches() -> None:
    # Figure 12: 175B on 96 GPUs, two layers per stage when interleaved.
    gains = []
    for batch in (12, 24, 36, 48, 60):
        plain, interleaved = (
            _tera_per_gpu(GPT_3, tensor=8, pipeline=12, batch=batch, v=v) for v in (1, 4)
        )
        gains.append(interleaved / plain)
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 1.0


@each_row(
    ("gpt", "pipeline", "batch", "replicas"),
    (
        (GPT_3, 12, 1536, (4, 8, 16)),
        (MT_NLG, 35, 2240, (2, 4, 8)),
    ),
)
def test_more_gpus_for_the_same_batch_reach_less_each(
    gpt: Any, pipeline: int, batch: int, replicas: Any
) -> None:
    # Table 2: 153, 149, 141 and 171, 167, 159.
    found = [_tera_per_gpu(gpt, tensor=8, pipeline=pipeline, data=d, batch=batch) for d in replicas]
    assert found == sorted(found, reverse=True)
    assert found[2] / found[0] == pytest.approx(0.925, abs=0.03)
