"""Intra-GPU multiplexing: prefill and decode on shares of one device's SMs.

    x, 1 - x   shares of the SMs that prefill and decode have while both have work
    t          seconds of an operation on the whole device, F its operations, B its bytes
    c, m       seconds that F takes at the attained peak, B at the attained memory bandwidth

    t(s, w) = t max(c / s, m / (w min(1, s / s_sat))) / max(c, m)      on the share s, with the
    share w of the memory bandwidth

What is bound by compute slows in proportion to its share (semi-PD, arXiv:2504.19867: l_x = l_100 /
x), what is bound by memory only below the share s_sat whose multiprocessors can draw the whole
bandwidth (Nexus, arXiv:2507.06608: two regimes around a point of saturation). GEMMs and experts are
priced on a device that has the share alone. Of attention, what it takes beyond its bytes and its
start is work of multiprocessors, and slows in proportion. Prefill's own traffic
is gone for decode while both run:

    w_decode = 1 - q,   q = bytes of a prompt / (its seconds on x  bandwidth)

which is Nexus' BW (1 - q beta) with q taken as the share of the bandwidth that prefill draws and
beta = 1, the most that it can take. When one phase has nothing to do the other has the whole
device.

s_sat: a multiprocessor draws 67 GB/s at most: 5,120 bytes a clock from the L2 cache at 1.41 GHz
over 108 multiprocessors (NVIDIA A100 whitepaper); Hopper's are assumed equal.

    steady state of n running sequences, O output tokens, P(x) seconds of a prompt, T(1)
    seconds of a step alone and T(y) beside a prompt; rho = r P(x) is prefill's busy share:
    n = r O TPOT,  1 / TPOT = rho / T(y) + (1 - rho) / T(1)
    =>  r = (n / T(1)) / (O + n P(x) (1 / T(1) - 1 / T(y))),  at most 1 / P(x)

Evidence: no measurement of ours. semi-PD's fit of Llama3-8B on A100s, TPOT(y) = 0.6284 / y + 0.3818
of its time alone, lies between this model's curves of few and of many running sequences
(tests/tuner/costs/serve/test_multiplexing.py).

Letters: Q query points. Not covered: collectives, which take as long as without multiplexing;
attention-data ranks, which would have to agree on when prompts run; activations of both phases
resident at once; power, which two busy phases share.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Final

import numpy as np

from tuner.costs.serve.attention import AttentionLayer
from tuner.costs.serve.decoder import AttentionKind
from tuner.costs.serve.iteration import Iteration
from tuner.prices.ops import Op
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.machine import SMALL_S, ServingMachine
from tuner.prices.serve.rated_attention import DECODE_S
from tuner.prices.serve.work import Work, work

PORT_BYTES_PER_S: Final = 67e9
"""Bytes a second that one multiprocessor draws at most; the module's docstring derives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """Share of a device that one phase has."""

    compute_ratio: float
    """Share of the multiprocessors."""
    bandwidth_ratio: float = 1.0
    """Share of the memory bandwidth that the other phase leaves."""

    def __post_init__(self) -> None:
        if not (0.0 < self.compute_ratio <= 1.0 and 0.0 < self.bandwidth_ratio <= 1.0):
            raise ValueError(f"{self} must be shares above 0, at most 1")


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedMachine(ServingMachine):
    """A system of which one phase has a share."""

    share: DeviceShare

    def bounds_on_share_s(self, flop_Q: Floats, bytes_Q: Floats) -> tuple[Floats, Floats]:
        """Seconds of bf16 operations and bytes on the whole device, and on the share."""
        compute_s_Q, memory_s_Q = self.bounds_s(flop_Q, bytes_Q, dtype="bf16")
        on_share_s_Q = np.maximum(
            compute_s_Q / self.share.compute_ratio, memory_s_Q / self._drawn_ratio
        )
        whole_s_Q = np.maximum(compute_s_Q, memory_s_Q)
        return whole_s_Q, np.maximum(on_share_s_Q, whole_s_Q)

    @property
    def _drawn_ratio(self) -> float:
        """Share of the memory bandwidth that the phase can draw."""
        drawn = min(1.0, self.share.compute_ratio / self.saturating_ratio)
        return self.share.bandwidth_ratio * drawn

    @cached_property
    def _on_share(self) -> ServingMachine:
        """A device that has the share alone, by its datasheet."""
        sheet, ratio = self.sheet, self.share.compute_ratio
        changes = {
            "flop_per_s": {units: ratio * rate for units, rate in sheet.flop_per_s.items()},
            "compute_units": max(round(ratio * sheet.compute_units), 1),
            "memory_bytes_per_s": self._drawn_ratio * sheet.memory_bytes_per_s,
        }
        changed = sheet.model_copy(update=changes)
        return ServingMachine(sheet=changed, tables=None, engines=self.engines)

    @property
    def saturating_ratio(self) -> float:
        """Share of the multiprocessors that draws the whole memory bandwidth."""
        ports = self.sheet.compute_units * PORT_BYTES_PER_S
        return min(1.0, self.sheet.memory_bytes_per_s / ports)

    def seconds(self, op: Op) -> Floats:
        """Wall time; attention is stretched by its iteration, collectives are not."""
        whole_Q = super().seconds(op)
        if op.operation in ("gemm", "moe"):
            return whole_Q * np.maximum(self._on_share.rated_s(op) / self.rated_s(op), 1.0)
        if op.operation == "memory_bound":
            least_Q, on_share_Q = self.bounds_on_share_s(*work(op))
            return whole_Q + (whole_Q - self.small_s) * (
                on_share_Q / np.maximum(least_Q, 1e-15) - 1.0
            )
        return whole_Q


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedIteration(Iteration):
    """An engine's steps on a share of its devices."""

    machine: SharedMachine

    def decode_s(self, n_Q: Floats, past_Q: Floats) -> Floats:
        """Attention of all layers for one new token of each of n sequences."""
        work = [
            (count * flop_Q, count * bytes_Q)
            for count, layer in self.attention_layers
            for flop_Q, bytes_Q in [_decode_work(layer, n_Q, past_Q)]
        ]
        flop_Q = np.sum([layer_flop_Q for layer_flop_Q, _ in work], axis=0)
        bytes_Q = np.sum([layer_bytes_Q for _, layer_bytes_Q in work], axis=0)
        whole_Q = super().decode_s(n_Q, past_Q)
        least_Q, on_share_Q = self.machine.bounds_on_share_s(flop_Q, bytes_Q)
        started_s = DECODE_S + self.machine.small_s - SMALL_S
        start_s = started_s * sum(count for count, _ in self.attention_layers)
        beside_Q = np.maximum(whole_Q - least_Q - start_s, 0.0)
        more_Q = beside_Q * (1.0 / self.machine.share.compute_ratio - 1.0)
        return np.asarray(whole_Q + on_share_Q - least_Q + more_Q)

    def prompt_s(self, s_Q: Floats) -> Floats:
        """Attention of all layers for one prompt of s tokens, which compute binds."""
        return super().prompt_s(s_Q) / self.machine.share.compute_ratio


def _decode_work(layer: AttentionLayer, n_Q: Floats, past_Q: Floats) -> Work:
    attention = layer.attention
    if attention.kind in (AttentionKind.GROUPED, AttentionKind.LATENT):
        return work(layer.decode_core(n_Q, past_Q))
    if attention.linear is not None:
        # A state of fixed size is read and written.
        return 0.0 * n_Q, n_Q * 2.0 * layer.state_bytes * layer.linear.state_elements
    # Few tokens or entries are read.
    width = 1.0 if layer.formats.kv == "fp8" else 2.0
    return 0.0 * n_Q, n_Q * float(attention.kv_elements) * width


def on_share(iteration: Iteration, share: DeviceShare) -> SharedIteration:
    """Return the engine on that share of its devices."""
    whole = iteration.machine
    machine = SharedMachine(
        sheet=whole.sheet,
        tables=whole.tables,
        engines=whole.engines,
        estimated=whole.estimated,
        corrections=whole.corrections,
        share=share,
    )
    known = {field.name: getattr(iteration, field.name) for field in fields(Iteration)}
    return SharedIteration(**{**known, "machine": machine})


def drawn_ratio(iteration: Iteration, *, tokens: float, seconds: float) -> float:
    """Share of the memory bandwidth that a prompt draws: its weights' and activations' bytes."""
    machine = iteration.machine
    traffic = _Traffic(sheet=machine.sheet, tables=None, engines={}, estimated=set())
    known = {field.name: getattr(iteration, field.name) for field in fields(Iteration)}
    counting = Iteration(**{**known, "machine": traffic})
    parts = counting.linear_parts(np.array([tokens]))
    moved_s = sum(float(seconds_Q[0]) for seconds_Q in parts.values())
    return min(moved_s / seconds, 0.9)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Traffic(ServingMachine):
    """Prices the bytes of every operation alone, so that steps become seconds of memory."""

    def seconds(self, op: Op) -> Floats:
        if op.operation == "collective":
            return np.zeros_like(op.axes["bytes"])
        _, bytes_Q = work(op)
        return self.read_s(bytes_Q)


def steady_rate_per_s(
    running_N: Floats,
    *,
    isolated_s_N: Floats,
    multiplexed_s_N: Floats,
    prompt_s: float,
    output_tokens: float,
) -> tuple[Floats, Floats]:
    """Return requests a second of so many running sequences, and seconds per token.

    Model:   the module's steady state; where prefill is always busy, 1 / P(x) and T(y)
    """
    gained_N = 1.0 / isolated_s_N - 1.0 / multiplexed_s_N
    free_N = (running_N / isolated_s_N) / (output_tokens + running_N * prompt_s * gained_N)
    rate_N = np.minimum(free_N, 1.0 / prompt_s)
    busy_N = rate_N * prompt_s
    return rate_N, 1.0 / (busy_N / multiplexed_s_N + (1.0 - busy_N) / isolated_s_N)
