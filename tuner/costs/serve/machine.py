"""Seconds of one operation on one system: from its measured tables, else from the datasheet.

    t = max(operations / (0.7 peak), bytes / (0.8 bandwidth)) + 5 us        where nothing is
    measured

0.8 is the share of the memory bandwidth that aiconfigurator's system files state; 0.7 of the peak
is what large GEMMs of its H100 and H200 tables reach, and 5 us is what their smallest GEMMs
take beyond their bytes. Whatever came from the datasheet is named in `estimated`, so that a
prediction can be marked.

Letters: Q query points.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tuner.costs.serve.curves import Floats, SizeCurve
from tuner.costs.serve.decoder import BYTES
from tuner.costs.serve.tables import A2aCurves, KernelTables, Key
from tuner.devices.datasheet import Datasheet, Generation
from tuner.engines.serve_rules.manifest import LARGEST_DISPATCH_TOKENS

PEAK_RATIO: Final = 0.7
STREAM_RATIO: Final = 0.8
LAUNCH_S: Final = 5e-6

NORMAL: Final = "deepep_normal"
LOW_LATENCY: Final = "deepep_low_latency"
NODE_LATENCY_S: Final = 20e-6
"""Of a collective that leaves the scale-up domain, beyond the one inside it."""

LOAD: Final = "power_law_1.01"
"""Distribution of tokens over experts at which their kernels were measured; random prompts route
like this (median over models of aiconfigurator's collectors)."""
BALANCED: Final = "balanced"
"""The other distribution that every engine was measured at."""

DISPATCHED_LOAD: Final = {BALANCED: "uniform"}
"""What tables of dispatched experts call a distribution otherwise."""
ANY: Final = ""
"""Every engine's tables together."""

PEAK_OF: Final = {
    "bf16": ("bf16",),
    "fp8": ("fp8", "bf16"),
    "fp8_block": ("fp8", "bf16"),
    "nvfp4": ("fp4", "bf16"),
    "int4_wo": ("bf16",),
    "mxfp4": ("bf16",),
}
"""Units that multiply a format, the first that a device has. Without units for fp4 engines unpack
such weights to bf16 as they read them (Marlin); mxfp4 meets fp8 activations on some engines only,
which their tables know."""
SIMILAR: Final = {
    "fp8": ("fp8_block",),
    "fp8_block": ("fp8",),
    "nvfp4": ("fp8", "fp8_block"),
    "int4_wo": ("nvfp4", "bf16"),
}
"""Formats that stand in where a format was not measured."""
UNPACKED: Final = {"nvfp4": ("int4_wo",)}
"""The same on devices without units for fp4, where other unpacked weights are similar."""
WRITTEN: Final = {"mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4")}
"""What tables call a format together with its activations. An engine's table holds those that it
runs; where it holds both, fp8 activations are what it runs by default (TensorRT-LLM's deployment
guide for gpt-oss, MoE backends; SGLang, `--flashinfer-mxfp4-moe-precision`)."""
STAND_IN: Final = {("trtllm", "fp8_block", Generation.BLACKWELL): "sglang"}
"""Whose table holds other expert kernels that an engine chooses from: TensorRT-LLM's block-scaled
experts were timed with DeepGEMM there, which its recipes take for many tokens; for few they take
generated kernels (`moe_config.backend: TRTLLM`), which SGLang's table measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """Routed experts as one rank runs them."""

    hidden: int
    ffn: int
    top_k: int
    experts: int
    tensor: int
    expert: int
    dtype: str
    load: str = LOAD
    """Distribution of tokens over experts."""
    dispatched: str = ""
    """`context` or `generation` where a rank holds the copies for its experts alone, as DeepEP's
    normal and low-latency kernels leave them; empty: it holds every token."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingMachine:
    """One system."""

    sheet: Datasheet
    tables: KernelTables | None
    estimated: set[str] = field(default_factory=set)
    """Filled on use: operations that came from the datasheet."""

    def gemm_s(self, m_Q: Floats, *, n: float, k: float, dtype: str, software: str) -> Floats:
        """One GEMM [m, k] x [k, n]."""
        if self.tables is not None:
            curve = self.tables.gemm(dtype=dtype, n=n, k=k, software=software)
            if curve is not None:
                return curve.seconds(m_Q)
        self.estimated.add(f"gemm {dtype}")
        return self.roofline_s(*gemm_work(m_Q, n=n, k=k, dtype=dtype), dtype=dtype)

    def roofline_s(self, flop_Q: Floats, bytes_Q: Floats, *, dtype: str) -> Floats:
        """Roofline time from the datasheet."""
        compute_s, memory_s = self.bounds_s(flop_Q, bytes_Q, dtype=dtype)
        return np.asarray(np.maximum(compute_s, memory_s) + LAUNCH_S)

    def bounds_s(self, flop_Q: Floats, bytes_Q: Floats, *, dtype: str) -> tuple[Floats, Floats]:
        """Seconds of the operations alone and of the bytes alone, at what is attained."""
        peak = next(rate for name in PEAK_OF[dtype] if (rate := self.sheet.flop_per_s.get(name)))
        memory_s = bytes_Q / (STREAM_RATIO * self.sheet.memory_bytes_per_s)
        return flop_Q / (PEAK_RATIO * peak), memory_s

    def curve(self, operation: str, keys: Sequence[Key]) -> SizeCurve | None:
        """The first of these shapes that was measured, as a curve."""
        if self.tables is None:
            return None
        return next((c for key in keys if (c := self.tables.curve(operation, key))), None)

    def moe_s(self, tokens_Q: Floats, shape: MoeShape, *, software: str) -> Floats:
        """Routed experts on the most-loaded rank, for `tokens` over all ranks that share them."""
        for dtype in (shape.dtype, *self._similar(shape.dtype)):
            for names in self._moe_choices(shape, dtype, software):
                known_seconds = [
                    self._moe_measured_s(tokens_Q, shape, name, dtype) for name in names
                ]
                known = [seconds_Q for seconds_Q in known_seconds if seconds_Q is not None]
                if known:
                    return np.asarray(np.min(known, axis=0))
        if shape.dispatched:
            whole = replace(shape, dispatched="")
            # Not through `self`, whose own method may price only its share on top.
            return ServingMachine.moe_s(self, tokens_Q, whole, software=ANY)
        self.estimated.add(f"moe {shape.dtype}")
        return self._moe_estimate_s(tokens_Q, shape)

    def _similar(self, dtype: str) -> tuple[str, ...]:
        if "fp4" not in self.sheet.flop_per_s and dtype in UNPACKED:
            return UNPACKED[dtype]
        return SIMILAR.get(dtype, ())

    def _moe_choices(
        self, shape: MoeShape, dtype: str, software: str
    ) -> tuple[tuple[str, ...], ...]:
        """Whose tables count together, the first that measured anything.

        Dispatched copies are what TensorRT-LLM's kernels see in any case; those of the others were
        timed over every token, so that the fastest of all stands in for dispatched copies.
        """
        if shape.dispatched or software == ANY:
            return (self._moe_softwares(),)
        own = software.partition("@")[0]
        rival = STAND_IN.get((own, dtype, self.sheet.generation), software)
        others = tuple((name,) for name in self._moe_softwares() if name != own)
        return ((software, rival), (own,), *others)

    def _moe_softwares(self) -> tuple[str, ...]:
        names = () if self.tables is None else self.tables.softwares("moe")
        return tuple(name for name in names if "@" not in name)

    def _moe_measured_s(
        self, tokens_Q: Floats, shape: MoeShape, software: str, dtype: str
    ) -> Floats | None:
        """From the measured degree of expert parallelism, or between the two around it."""
        curves = self._moe_degrees(shape, software, dtype)
        if not curves:
            return None
        if len(curves) == 1:
            return curves[0][1].seconds(tokens_Q)
        (low, below), (high, above) = curves
        share = np.log(shape.expert / low) / np.log(high / low)
        log_s_Q = (1.0 - share) * np.log(below.seconds(tokens_Q))
        return np.asarray(np.exp(log_s_Q + share * np.log(above.seconds(tokens_Q))))

    def _moe_degrees(
        self, shape: MoeShape, software: str, dtype: str
    ) -> list[tuple[int, SizeCurve]]:
        if self.tables is None:
            return []
        wanted = (shape.hidden, shape.ffn, shape.top_k, shape.experts, shape.tensor)
        kind = shape.load
        if shape.dispatched:
            kind = f"wideep_{shape.dispatched}/{DISPATCHED_LOAD.get(kind, kind)}"
        for written in WRITTEN.get(dtype, (dtype,)):
            beginning: Key = (software, kind, written, *wanted)
            degrees = self.tables.last_values("moe", beginning)
            low = [degree for degree in degrees if degree <= shape.expert]
            high = [degree for degree in degrees if degree >= shape.expert]
            curves = [
                (degree, curve)
                for degree in sorted({*low[-1:], *high[:1]})
                if (curve := self.tables.curve("moe", (*beginning, degree))) is not None
            ]
            if curves:
                return curves
        return []

    def _moe_estimate_s(self, tokens_Q: Floats, shape: MoeShape) -> Floats:
        """Weights of the experts that are reached, and the GEMMs of the rank's share."""
        return self.moe_rated_s(tokens_Q, shape, reached_Q=even_activated(tokens_Q, shape))

    def moe_rated_s(self, tokens_Q: Floats, shape: MoeShape, *, reached_Q: Floats) -> Floats:
        """Roofline time from the datasheet where a rank reads so many distinct experts."""
        flop_Q, bytes_Q = moe_work(tokens_Q, shape, reached_Q=reached_Q)
        return self.roofline_s(flop_Q, bytes_Q, dtype=shape.dtype) + LAUNCH_S

    def stream_s(self, bytes_Q: Floats, *, launch_s: float, ratio: float) -> Floats:
        """A small kernel that reads and writes so many bytes."""
        return launch_s + bytes_Q / (ratio * self.sheet.memory_bytes_per_s)

    def all_to_all_s(
        self, tokens_Q: Floats, *, hidden: int, top_k: int, ranks: int
    ) -> Floats | None:
        """Dispatch and combine by DeepEP's faster kernels; None where no table has them."""
        known_seconds = self.deepep_s(tokens_Q, hidden=hidden, top_k=top_k, ranks=ranks)
        known = [seconds_Q for seconds_Q in known_seconds if seconds_Q is not None]
        if not known:
            return None
        best_Q = np.min(known, axis=0)
        return np.asarray(best_Q) if np.isfinite(best_Q).all() else None

    def deepep_s(
        self, tokens_Q: Floats, *, hidden: int, top_k: int, ranks: int
    ) -> tuple[Floats | None, Floats | None]:
        """Dispatch and combine by DeepEP's normal and low-latency kernels; None if not measured.

        Low latency is infinite beyond what its buffers may hold; where it was measured with fewer
        tokens, it goes on in proportion. Of several shares of the device that served the normal
        mode the fastest counts, and of several numbers of experts, which differ by a few per cent.
        Ranks that were not measured take what the next larger number takes, or up to twice the
        largest what that takes.
        """
        measured = self._a2a_curves(hidden=hidden, top_k=top_k, ranks=ranks)
        halves: dict[tuple[str, str], Floats] = {}
        for (mode, half), curves in measured.items():
            fastest_Q = np.min([curve.seconds(tokens_Q) for curve in curves], axis=0)
            if mode == LOW_LATENCY:
                fastest_Q = np.where(tokens_Q > LARGEST_DISPATCH_TOKENS, np.inf, fastest_Q)
            halves[mode, half] = fastest_Q
        normal, low = (
            halves[mode, "dispatch"] + halves[mode, "combine"]
            if {(mode, "dispatch"), (mode, "combine")} <= set(halves)
            else None
            for mode in (NORMAL, LOW_LATENCY)
        )
        return normal, low

    def _a2a_curves(
        self, *, hidden: int, top_k: int, ranks: int
    ) -> Mapping[tuple[str, str], tuple[SizeCurve, ...]]:
        """Measured curves of the number of ranks that stands for this one."""
        if self.tables is None:
            return {}
        measured: A2aCurves = self.tables.a2a_curves(hidden=hidden, top_k=top_k)
        if not measured or not min(measured) <= ranks <= 2 * max(measured):
            return {}
        return measured[min((each for each in measured if each >= ranks), default=max(measured))]

    def collective_s(self, bytes_Q: Floats, *, kind: str, ranks: int, software: str) -> Floats:
        """One collective; `bytes` is the larger buffer of a rank."""
        if ranks <= 1:
            return np.zeros_like(bytes_Q)
        domain = min(ranks, self.sheet.scale_up_domain)
        seconds_Q = self._inside_s(bytes_Q, kind=kind, ranks=domain, software=software)
        if ranks > domain:
            factor = 2.0 if kind == "all_reduce" else 1.0
            share = factor * (1.0 - domain / ranks) / domain
            seconds_Q = (
                seconds_Q + NODE_LATENCY_S + share * bytes_Q / self.sheet.scale_out_bytes_per_s
            )
        return seconds_Q

    def _inside_s(self, bytes_Q: Floats, *, kind: str, ranks: int, software: str) -> Floats:
        curves = self._collective_curves(kind, ranks, software)
        if curves:
            return np.asarray(np.min([curve.seconds(bytes_Q) for curve in curves], axis=0))
        measured = sorted(self._measured_ranks(kind))
        if measured:
            # A larger group moves (R - 1) / R of the buffer and meets log2 R times.
            near = max([degree for degree in measured if degree <= ranks] or measured[:1])
            curves = self._collective_curves(kind, near, software)
            wider = (1.0 - 1.0 / ranks) / (1.0 - 1.0 / near)
            scale = max(wider, np.log2(ranks) / np.log2(near))
            fastest_Q = np.min([curve.seconds(bytes_Q) for curve in curves], axis=0)
            return np.asarray(fastest_Q * scale)
        self.estimated.add(kind)
        factor = 2.0 if kind == "all_reduce" else 1.0
        rate = STREAM_RATIO * self.sheet.scale_up_bytes_per_s
        return 2.0 * LAUNCH_S + factor * (1.0 - 1.0 / ranks) * bytes_Q / rate

    def _measured_ranks(self, kind: str) -> set[int]:
        if self.tables is None:
            return set()
        return {
            int(key[3])
            for key in self.tables.shapes("collective")
            if key[:3] == ("", kind, "") and isinstance(key[3], int)
        }

    def _collective_curves(self, kind: str, ranks: int, software: str) -> list[SizeCurve]:
        if self.tables is None:
            return []
        tail = ("", ranks, 1, ranks)
        names: list[Key] = [("", kind, *tail)]
        if kind == "all_reduce":
            names += [
                (library, f"all_reduce/{software}{graph}", *tail)
                for library in self.tables.softwares("collective")
                for graph in ("_graph", "")
            ]
        curves = [self.tables.curve("collective", name) for name in names]
        return [curve for curve in curves if curve is not None]


def gemm_work(m_Q: Floats, *, n: float, k: float, dtype: str) -> tuple[Floats, Floats]:
    """Operations and bytes of a GEMM; rows are bf16."""
    return 2.0 * m_Q * n * k, BYTES[dtype] * n * k + 2.0 * m_Q * (n + k)


def moe_work(tokens_Q: Floats, shape: MoeShape, *, reached_Q: Floats) -> tuple[Floats, Floats]:
    """Operations and bytes of the routed experts of one rank that reads so many of them."""
    copies_Q = tokens_Q * shape.top_k / shape.expert
    weights = 3.0 * shape.hidden * shape.ffn / shape.tensor
    activations_Q = 4.0 * copies_Q * (shape.hidden + shape.ffn / shape.tensor)
    return 2.0 * weights * copies_Q, activations_Q + BYTES[shape.dtype] * weights * reached_Q


def even_activated(tokens_Q: Floats, shape: MoeShape) -> Floats:
    """Distinct experts that a rank reads on average under uniform routing.

    Model:   E / R (1 - (1 - k / E)^m)
    Source:  Janus (arXiv:2512.13525)
    """
    unread_share = 1.0 - shape.top_k / shape.experts
    return np.asarray(
        shape.experts / shape.expert * (1.0 - unread_share ** np.maximum(tokens_Q, 1.0))
    )
