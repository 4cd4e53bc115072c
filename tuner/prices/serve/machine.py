"""Seconds of one operation on one system: from its measured tables, else from the datasheet.

GEMMs, attention and experts have formulas of their own (../rated_gemm.py, rated_attention.py,
rated_experts.py); everything else, and processors, whose sheets hold rates that were reached, have

    t = max(operations / (0.7 peak), bytes / (0.8 bandwidth)) + 5 us

0.7 of the peak is what GEMMs of a model sustain on H100 and H200; a device of which other figures
are known states them in its datasheet (`reached_ratio`). 0.8 is the share of the memory bandwidth
that aiconfigurator's system files state. Whatever came from the datasheet is named in `estimated`,
so that a prediction can be marked.

Not covered: attention over chosen keys (`sparse_core`) starts as other kernels do, and pads no
heads.

Letters: Q query points.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Final

import numpy as np

from tuner.catalog.serve_rules.manifest import LARGEST_DISPATCH_TOKENS
from tuner.catalog.serve_rules.traits import EngineTraits
from tuner.devices.datasheet import Datasheet, Generation, Vendor
from tuner.prices.ops import Op
from tuner.prices.peer_link import LAUNCH_S, STREAM_RATIO, peer_link
from tuner.prices.rated_gemm import SUSTAINED_RATIO, gemm_share, rated_gemm_s, reached_share
from tuner.prices.serve.attention_tables import measured_attention_s
from tuner.prices.serve.corrections import UNCORRECTED, StepCorrections
from tuner.prices.serve.curves import Floats, SizeCurve
from tuner.prices.serve.network_collectives import network_collective_s
from tuner.prices.serve.rated_attention import rated_decode_s, rated_prompt_s
from tuner.prices.serve.rated_experts import rated_experts_s
from tuner.prices.serve.tables import FASTEST, A2aCurves, KernelTables, Key
from tuner.prices.serve.work import (
    BYTES,
    UNEQUAL_HIDDEN,
    even_activated,
    experts_work,
    most_activated,
    work,
)

CPU_EXPERTS_S: Final = 30e-6
CPU_EXPERTS_RATIO: Final = 1.4
"""Start of a layer's experts on a processor, and the time of their operations over that of a GEMM's
as large."""
UNTUNED_S: Final = 0.2e-3
"""Seconds of a layer's experts beyond their work where an engine has no tuned kernels for a vendor
(`EngineTraits.untuned_experts`). One stream of SGLang 0.5.7 to 0.5.13 on MI300X lacks 0.27 ms a
layer of DeepSeek-V3.1 and V3, 0.26 of MiniMax-M2 (4 devices), 0.16 of Qwen3-Coder-480B and 0.13 of
MiniMax-M2.7 (2; pull request 31044), all in blocks of fp8, but 0.05 of bf16 (Llama-4, Kimi-Linear):
sgl-project/sgl-cookbook, docs/autoregressive, at commit of 2026-05-01."""
UNTUNED_INT4_RATIO: Final = 0.03
"""Share of the memory's bandwidth at which untuned kernels read int4 experts to unpack: Kimi-K2.5
on 4 MI350X takes 35.6 ms a token of one sequence, 191 of 16 (the same pages, Kimi-K2.5.md). A
profile on 8 shows 9.1 ms a GEMM from 128 tokens on, 0.01 of it (sgl-project/sglang, pull request
34460)."""
NORMAL: Final = "deepep_normal"
LOW_LATENCY: Final = "deepep_low_latency"

LOAD: Final = "power_law_1.01"
"""Distribution of tokens over experts at which their kernels were measured; random prompts route
like this (median over models of aiconfigurator's collectors)."""
BALANCED: Final = "balanced"
"""Balanced distribution of tokens over experts, the other one that every engine was measured at."""

DISPATCHED_LOAD: Final = {BALANCED: "uniform"}
"""Names of distributions in tables of dispatched experts, where they differ."""
UNGATED: Final = "nongated"
"""Suffix that tables add to the kind of experts with two matrices."""
ANY: Final = ""
"""Software name that stands for the tables of all engines together."""

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
"""Formats that stand in on devices without units for fp4, where other unpacked weights are
similar."""
WRITTEN: Final = {"mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4")}
"""Names in tables of a format together with its activations. An engine's table holds those that it
runs; where it holds both, fp8 activations are what it runs by default (TensorRT-LLM's deployment
guide for gpt-oss, MoE backends; SGLang, `--flashinfer-mxfp4-moe-precision`)."""
BLOCK_SCALED: Final = frozenset({"fp8_block", "nvfp4"})
"""Formats with scales of blocks, which a kernel of its own quantises rows to; those with one scale
are quantised by the kernel before."""
QUANTISE_S: Final[Mapping[Generation, float]] = {
    Generation.HOPPER: 2.7e-6,
    Generation.ADA: 2.7e-6,
    Generation.BLACKWELL: 4.7e-6,
    Generation.BLACKWELL_RTX: 2.7e-6,
}
UNPACK_S: Final = 27e-12
"""Seconds in which one compute unit unpacks a weight: on the 108 of A100 TensorRT-LLM's GEMMs of
int4 weights take 0.25 ps a weight longer than their bytes from 16 to 128 tokens, int8 0.14 to 0.3
(aiconfigurator-core 0.12.0, 2,048 and more columns)."""

PROMPTS: Final = frozenset({"attention", "latent_attention"})
DECODES: Final = frozenset({"decode_attention", "latent_decode"})
"""Attention over prompts, and of running sequences over their caches."""
BF16_CORES: Final = frozenset({"latent_product", "sparse_core"})
"""Operations whose GEMMs stay in bf16, whatever their caches hold."""
FP8_CORES: Final = frozenset({"index_scores"})
"""Operations that are computed in fp8 where a device has it."""
EAGER_LAYER_S: Final[Mapping[Vendor, float]] = {
    Vendor.NVIDIA: 0.7e-3,
    Vendor.AMD: 0.7e-3,
    Vendor.HUAWEI: 1.9e-3,
}
"""Seconds the host takes to launch a dense layer's kernels one by one, whatever they compute, by
vendor: the least time of a step without graphs. CUDA: 42 to 45 ms of 64 layers from 1 to 8
sequences, 16 with graphs (local-inference-lab/vllm, pull request 314), 22 ms of 28 layers, 13 with
graphs (vllm-omni, issue 7960). Ascend, layers with experts: 165 to 171 ms of 62, 56 with graphs
(vllm-ascend, issue 7723), 123 ms of 48 (GPUStack, performance lab, Qwen3-30B-A3B on 910B). ROCm's
is CUDA's."""
COMPILED_LAYER_S: Final[Mapping[Vendor, float]] = {Vendor.NVIDIA: 0.45e-3, Vendor.AMD: 0.45e-3}
"""Host seconds of a compiled layer: its norms, activations and quantisations are fewer kernels, and
its mixer is one call. With 0.35 to 0.5 ms a layer for prompts beyond graphs, published runs of
vLLM on B200, B300 and H200 are nearer and those on H100 as near as without, each by itself."""
PIECES_LAYER_S: Final = 0.75e-3
WHOLE_LAYER_S: Final = 0.4e-3
"""Seconds of a layer beyond its kernels where an engine's graphs may come in pieces, between which
the host launches attention, as vLLM's do by default on Ascend (vllm-ascend, issue 5739), and where
one graph holds the step there: devices idle meanwhile, so they add to kernels. A profile of
Qwen3-30B-A3B on two 910B3 shows 0.83 ms a block, idle for 0.59 of it, with pieces (issue 9404); 58
ms of 61 layers of one sequence (docs/source/tutorials/models/Kimi-K2-Thinking.md). One graph leaves
0.31 to 0.46: 20 ms of 48 layers (Qwen3-30B-A3B) and of 36 (Qwen3-4B), 38 of 64 (Qwen3-32B; issue
4656), 28 of 48 (Qwen3-Next, issue 6389), on four 910B."""
EAGER_EXPERTS: Final = 1.7
EAGER_MIXERS: Final = 3.0
EAGER_DELTAS: Final = 9.0
"""Host seconds of a network with experts, of a mixer with latent keys or a state, and of a delta
rule, whose chunks take some ten launches of Triton, over those of grouped attention or of a dense
network, half a layer each. A prompt of 500 tokens delays others by 0.6 to 1.2 ms a layer with
experts (GLM-4.6, MiniMax-M2.5, Qwen3-235B, Step-3.5-Flash, ERNIE-4.5-21B), 1.6 with latent
attention (DeepSeek-R1, GLM-4.7-Flash), 3.8 and 4.9 with delta rules (Qwen3-Coder-Next,
Kimi-Linear): sgl-cookbook, docs/autoregressive, P99 less median of the time between tokens at 16
requests, SGLang 0.5.6 to 0.5.8 on B200, H200 and MI300X."""
PUSHES: Final = frozenset({"sglang", "trtllm"})
"""Engines whose all-reduce sends a small buffer to every rank at once, with flags in it; others'
ranks wait for each other before and after they read."""
ARRIVAL_S: Final = 1.8e-6
"""Seconds that the ranks of a step wait for the last of them beside what an all-reduce takes alone:
with 7 us in all those of vLLM on H100 and H200 are as published."""
PUSH_S: Final[Mapping[Generation, float]] = {
    Generation.HOPPER: 3.3e-6,
    Generation.BLACKWELL: 5.2e-6,
}
ALL_REDUCE_S: Final[Mapping[Generation, float]] = {
    Generation.AMPERE: 6.2e-6,
    Generation.BLACKWELL: 7.5e-6,
}
USUAL_ALL_REDUCE_S: Final = 5.2e-6
TWO_STAGE_S: Final[Mapping[Generation, float]] = {Generation.BLACKWELL: 17e-6}
USUAL_TWO_STAGE_S: Final = 8e-6
TWO_STAGE_BYTES: Final = 2.0**21
OWN_BYTES_PER_S: Final = 350e9
"""An engine's own all-reduce inside a CUDA graph: its start, what a second stage adds for eight
ranks, the buffer, times the ranks, from which on it is paid in full, and the rate of its copies.
Eight ranks take 7, 6, 8 us for 16 KiB and 20, 16, 26 for 512 KiB on A100, H100 and B200 with
SGLang 0.5.10 or vLLM 0.24, 4 and 6 us for 16 KiB, 15 to 18 and 11 for 512 with SGLang 0.5.14 or
TensorRT-LLM 1.3.0rc20 (aiconfigurator-core 0.12.0, custom_allreduce_perf). NCCL starts a pass in 5
us times log2 of the ranks (there, nccl_perf: 7 to 12 us for 4 ranks, 11 to 19 for 8)."""
PAIR: Final = 2
LINKED_BYTES_PER_S: Final = 100e9
"""Devices with slower links than this sit on PCIe, where engines leave the all-reduce of more than
two to NCCL (vLLM, device_communicators/custom_all_reduce.py; SGLang has the same)."""
STATE_S: Final = 3e-6
"""Start of a kernel that updates states: one H200 takes 4.3 to 5.9 us for one sequence of 2 to 8 MB
(mamba_ssm's selective_state_update, flash-linear-attention's fused_recurrent_gated_delta_rule).
Its bytes pass at the rate of other small kernels, 0.58 to 0.74 of the bandwidth there."""
SCAN_KERNELS: Final = 5
"""Kernels of a prompt's scan in chunks: decays, scores, states of chunks, passing them on, outputs
(mamba_ssm, ops/triton/ssd_combined.py)."""
SMALL_S: Final = 1.5e-6
ROCM_SMALL_S: Final = 5e-6
SMALL_RATIO: Final = 0.7
"""A memory-bound kernel inside a graph: its start, and what it reaches of the bandwidth. ROCm's
graphs leave as much between small kernels as between others: one sequence lacked 0.03 to 0.07 ms a
layer on MI300X and MI350X at CUDA's start (seven models of sgl-cookbook, with SGLang 0.5.7 to
0.5.9)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Seconds of an engine's host, as measured in its own steps."""

    step_s: float
    """Seconds between two steps beyond the sum of their kernels, with prompts in them or not."""
    tensor_step_s: float
    """Seconds added to `step_s` where tensor ranks share a step and wait for each other."""
    sequence_s: float
    """Seconds per running sequence in a step."""
    request_s: float
    """Seconds of a request in HTTP server, tokeniser and client."""

    def stretched(self, factor: float) -> "HostTimes":
        """Return all of them, so many times as long."""
        return HostTimes(**{span.name: factor * getattr(self, span.name) for span in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingMachine:
    """One system."""

    sheet: Datasheet
    tables: KernelTables | None
    engines: Mapping[str, EngineTraits]
    """Every engine, by its name, as tables and operations name their software."""
    host: HostTimes | None = None
    """Measured seconds of the host; None: as the engine's traits say, and clocks fall under
    load."""
    core_ratio: float = 1.0
    """Share of the time of a rank's cores in which its engine computes."""
    corrections: StepCorrections = UNCORRECTED
    """Factors that a running server showed on parts of its steps; iterations apply them."""
    estimated: set[str] = field(default_factory=set)
    """Operations that were priced from the datasheet; filled on use."""
    priced: dict[tuple[object, ...], Floats] = field(default_factory=dict, init=False, repr=False)
    """Seconds of operations priced so far, shared by instances that differ elsewhere; filled on
    use."""

    def seconds(self, op: Op) -> Floats:
        """Wall time: as measured, else from the datasheet, which `estimated` then names."""
        if op.operation == "memory_bound":
            return np.asarray(self._whole_core_s(op) / self.core_ratio)
        sizes = [s.tobytes() if isinstance(s, np.ndarray) else s for s in op.axes.values()]
        key = (op.operation, op.kind, op.dtype, op.direction, op.software, *op.axes, *sizes)
        seconds_Q = self.priced.get(key)
        if seconds_Q is None:
            seconds_Q = np.asarray(self._whole_core_s(op) / self.core_ratio)
            seconds_Q.setflags(write=False)
            self.priced[key] = seconds_Q
        return seconds_Q

    @property
    def small_s(self) -> float:
        """Start of a memory-bound kernel inside a graph."""
        return ROCM_SMALL_S if self.sheet.generation.vendor is Vendor.AMD else SMALL_S

    @property
    def _rocm_more_s(self) -> float:
        """ROCm leaves as much more before GEMMs and attention as before small kernels."""
        return self.small_s - SMALL_S

    def _whole_core_s(self, op: Op) -> Floats:
        if op.operation == "memory_bound":
            rate = SMALL_RATIO * self.sheet.memory_bytes_per_s
            return self.small_s + np.asarray(op.axes["bytes"]) / rate
        if op.operation == "collective":
            return self._collective_s(op)
        measured_Q = self.measured_s(op)
        if measured_Q is not None:
            return measured_Q
        has_dtype = op.operation in ("gemm", "moe")
        self.estimated.add(f"{op.operation} {op.dtype}" if has_dtype else op.operation)
        return self.rated_s(op)

    def measured_s(self, op: Op) -> Floats | None:
        """Wall time as measured; None where no table holds the shape."""
        if self.tables is None:
            return None
        if op.operation == "gemm":
            n, k = float(op.axes["n"]), float(op.axes["k"])
            traits = self.engines.get(op.software)
            is_spoilt = traits is not None and op.dtype in traits.spoilt_gemms
            software = FASTEST if is_spoilt else op.software
            curve = self.tables.gemm(dtype=op.dtype, n=n, k=k, software=software)
            return None if curve is None else curve.seconds(np.asarray(op.axes["m"]))
        if op.operation == "moe":
            return self._experts_s(self.tables, op)
        return measured_attention_s(self.tables, op)

    def rated_s(self, op: Op) -> Floats:
        """Wall time from the datasheet."""
        if op.operation == "moe":
            reached = even_activated if op.kind.endswith(BALANCED) else most_activated
            return self.rated_experts_s(op, reached_Q=reached(op))
        if op.operation in ("linear_update", "linear_scan"):
            return self._rated_linear_s(op)
        if op.operation in PROMPTS | DECODES:
            return self.rated_attention_s(op)
        if op.operation in FP8_CORES:
            return self.roofline_s(*work(op), dtype="fp8")
        if op.operation == "gemm" and self.sheet.generation.vendor is not Vendor.CPU:
            return self._rocm_more_s + self._rated_gemm_s(op)
        dtype = "bf16" if op.operation in BF16_CORES else op.dtype
        return self.roofline_s(*work(op), dtype=dtype)

    def _rated_gemm_s(self, op: Op) -> Floats:
        """Time of a GEMM alone, and of what its number format adds.

        Without units for a format, kernels unpack its weights to bf16 as they read them.
        """
        sheet, units = self.sheet, self._units(op.dtype)
        m_Q, n, k = np.asarray(op.axes["m"], dtype=np.float64), op.axes["n"], op.axes["k"]
        is_block_scaled = op.dtype in BLOCK_SCALED and units != "bf16"
        share = reached_share(gemm_share(sheet, units=units, dtype=op.dtype), sheet.matrix_ratio)
        seconds_Q = rated_gemm_s(
            sheet,
            m_Q.ravel(),
            n,
            k,
            flop_per_s=share * sheet.flop_per_s[units],
            speedup=sheet.flop_per_s[units] / sheet.flop_per_s["bf16"],
            weight_bytes=BYTES[op.dtype],
            unpack_s=UNPACK_S * n * k / sheet.compute_units if units == "bf16" != op.dtype else 0.0,
        )
        quantise_s = QUANTISE_S.get(sheet.generation, QUANTISE_S[Generation.HOPPER])
        return np.reshape(seconds_Q, m_Q.shape) + (quantise_s if is_block_scaled else 0.0)

    def rated_attention_s(self, op: Op, *, checked: int = 1) -> Floats:
        """Time of attention from the datasheet, of running sequences with so many new tokens."""
        sheet = self.sheet
        if sheet.generation.vendor is Vendor.CPU:
            flop_Q, bytes_Q = work(op)
            return self.roofline_s(checked * flop_Q, bytes_Q, dtype="bf16")
        if op.operation in PROMPTS:
            return self._rocm_more_s + rated_prompt_s(sheet, op)
        traits = self.engines.get(op.software)
        has_fp8 = traits is not None and traits.multiplies_fp8_caches
        return self._rocm_more_s + rated_decode_s(sheet, op, has_fp8=has_fp8, checked=checked)

    def _rated_linear_s(self, op: Op) -> Floats:
        """Linear attention: its bytes at the rate of small kernels, beside which it computes.

        Error:   the rows of one H200 in tests/tuner/costs/serve/test_linear_attention.py, within a
                 quarter; 32,768 tokens of Nemotron-3 Nano's scan within 3 %.
        """
        flop_Q, bytes_Q = work(op)
        compute_Q, _ = self.bounds_s(flop_Q, bytes_Q, dtype="bf16")
        memory_Q = bytes_Q / (SMALL_RATIO * self.sheet.memory_bytes_per_s)
        if op.operation == "linear_update":
            return np.asarray(STATE_S + np.maximum(compute_Q, memory_Q))
        return np.asarray(SCAN_KERNELS * LAUNCH_S + compute_Q + memory_Q)

    def rated_experts_s(self, op: Op, *, reached_Q: Floats) -> Floats:
        """Time of routed experts from the datasheet, where a rank reads so many distinct ones."""
        if self.sheet.generation.vendor is Vendor.CPU:
            work_Q = experts_work(op, reached_Q=reached_Q, passes=2.0)
            compute_Q, memory_Q = self.bounds_s(*work_Q, dtype=op.dtype)
            return np.asarray(CPU_EXPERTS_S + memory_Q + CPU_EXPERTS_RATIO * compute_Q)
        is_untuned = self._are_untuned(op)
        is_slow = is_untuned and op.dtype == "int4_wo"
        seconds_Q = rated_experts_s(
            self.sheet,
            op,
            reached_Q=reached_Q,
            units=self._units(op.dtype),
            is_uneven=not (op.kind.endswith(BALANCED) or op.dtype in UNEQUAL_HIDDEN),
            bandwidth_ratio=UNTUNED_INT4_RATIO if is_slow else 1.0,
        )
        return np.asarray(UNTUNED_S * is_untuned + seconds_Q)

    def _are_untuned(self, op: Op) -> bool:
        traits = self.engines.get(op.software.partition("@")[0])
        untuned = frozenset() if traits is None else traits.untuned_experts
        return (self.sheet.generation.vendor, op.dtype) in untuned

    def roofline_s(self, flop_Q: Floats, bytes_Q: Floats, *, dtype: str) -> Floats:
        """Roofline time from the datasheet."""
        compute_s, memory_s = self.bounds_s(flop_Q, bytes_Q, dtype=dtype)
        return np.asarray(np.maximum(compute_s, memory_s) + LAUNCH_S)

    def bounds_s(self, flop_Q: Floats, bytes_Q: Floats, *, dtype: str) -> tuple[Floats, Floats]:
        """Seconds of the operations alone and of the bytes alone, at what is attained."""
        sheet, units = self.sheet, self._units(dtype)
        reached_per_s = sheet.reached_ratio.get(units, SUSTAINED_RATIO) * sheet.flop_per_s[units]
        memory_s = bytes_Q / (STREAM_RATIO * sheet.memory_bytes_per_s)
        return flop_Q / reached_per_s, memory_s

    def read_s(self, bytes_Q: Floats) -> Floats:
        """Seconds in which bytes pass memory at its peak."""
        return np.asarray(bytes_Q / self.sheet.memory_bytes_per_s)

    def message_s(self, bytes_Q: Floats, *, is_inside: bool) -> Floats:
        """Seconds of a message from a rank to another, inside a scale-up domain or beyond."""
        link = peer_link(
            inside_bytes_per_s=self.sheet.scale_up_bytes_per_s,
            nic_bytes_per_s=self.sheet.scale_out_bytes_per_s,
            is_inside=is_inside,
        )
        return link.seconds(bytes_Q)

    def outside_s(self, bytes_Q: Floats, *, ratio: float) -> Floats:
        """Seconds in which bytes pass a device's NIC, which reaches a share of its rate."""
        return np.asarray(bytes_Q / (ratio * self.sheet.scale_out_bytes_per_s))

    def _units(self, dtype: str) -> str:
        """The units that multiply a format."""
        return next(name for name in PEAK_OF[dtype] if self.sheet.flop_per_s.get(name))

    def _experts_s(self, tables: KernelTables, op: Op) -> Floats | None:
        """Routed experts on the most-loaded rank, for tokens over all ranks that share them."""
        for dtype in (op.dtype, *self._similar(op.dtype)):
            for names in self._expert_choices(tables, op, dtype):
                known_seconds = [
                    _measured_experts_s(tables, replace(op, software=name, dtype=dtype))
                    for name in names
                ]
                known = [seconds_Q for seconds_Q in known_seconds if seconds_Q is not None]
                if known:
                    return np.asarray(np.min(known, axis=0))
        dispatched, _, load = op.kind.rpartition("/")
        whole = replace(op, kind=load, software=ANY)
        return self._experts_s(tables, whole) if dispatched else None

    def _similar(self, dtype: str) -> tuple[str, ...]:
        if "fp4" not in self.sheet.flop_per_s and dtype in UNPACKED:
            return UNPACKED[dtype]
        return SIMILAR.get(dtype, ())

    def _expert_choices(
        self, tables: KernelTables, op: Op, dtype: str
    ) -> tuple[tuple[str, ...], ...]:
        """Whose tables count together, the first that measured anything.

        Dispatched copies are what TensorRT-LLM's kernels see in any case; those of the others were
        timed over every token, so that the fastest of all stands in for dispatched copies.
        """
        every = tuple(name for name in tables.softwares("moe") if "@" not in name)
        if "/" in op.kind or op.software == ANY:
            return (every,)
        engine = op.software.partition("@")[0]
        traits = self.engines.get(engine)
        like = {} if traits is None else traits.experts_like
        rival = like.get((dtype, self.sheet.generation), op.software)
        others = tuple((name,) for name in every if name != engine)
        return ((op.software, rival), (engine,), *others)

    def all_to_all_s(
        self, tokens_Q: Floats, *, hidden: int, top_k: float, ranks: int
    ) -> Floats | None:
        """Dispatch and combine by DeepEP's faster kernels; None where no table has them."""
        known_seconds = self.deepep_s(tokens_Q, hidden=hidden, top_k=top_k, ranks=ranks)
        known = [seconds_Q for seconds_Q in known_seconds if seconds_Q is not None]
        if not known:
            return None
        best_Q = np.min(known, axis=0)
        return np.asarray(best_Q) if np.isfinite(best_Q).all() else None

    def deepep_s(
        self, tokens_Q: Floats, *, hidden: int, top_k: float, ranks: int
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
        self, *, hidden: int, top_k: float, ranks: int
    ) -> Mapping[tuple[str, str], tuple[SizeCurve, ...]]:
        """Measured curves of the number of ranks that stands for this one."""
        if self.tables is None:
            return {}
        measured: A2aCurves = self.tables.a2a_curves(hidden=hidden, top_k=round(top_k))
        if not measured or not min(measured) <= ranks <= 2 * max(measured):
            return {}
        return measured[
            min((degree for degree in measured if degree >= ranks), default=max(measured))
        ]

    def _collective_s(self, op: Op) -> Floats:
        """One collective; its bytes are the larger buffer of a rank."""
        bytes_Q, ranks = np.asarray(op.axes["bytes"]), int(op.axes["ranks"])
        if ranks <= 1:
            return np.zeros_like(bytes_Q)
        domain = min(ranks, self.sheet.scale_up_domain)
        inside = partial(self._inside_s, kind=op.kind, ranks=domain, software=op.software)
        if ranks <= domain:
            return inside(bytes_Q)
        factor = 2.0 if op.kind == "all_reduce" else 1.0
        share = factor * (1.0 - domain / ranks) / domain
        # Its own kernels an engine has inside a domain only; what they start with does not count.
        moved_Q = np.maximum(inside(bytes_Q) - inside(np.ones_like(bytes_Q)), 0.0)
        moved_Q = moved_Q + share * bytes_Q / self.sheet.scale_out_bytes_per_s
        return network_collective_s(
            bytes_Q, moved_Q, kind=op.kind, domain=domain, domains=math.ceil(ranks / domain)
        )

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
        passes = 2.0 if kind == "all_reduce" else 1.0
        moved_Q = passes * (1.0 - 1.0 / ranks) * bytes_Q
        rate = STREAM_RATIO * self.sheet.scale_up_bytes_per_s
        nccl_Q = passes * LAUNCH_S * math.log2(ranks) + moved_Q / rate
        is_linked = self.sheet.scale_up_bytes_per_s >= LINKED_BYTES_PER_S
        has_own = kind == "all_reduce" and self.sheet.generation.vendor is not Vendor.HUAWEI
        if not has_own or (ranks > PAIR and not is_linked):
            return np.asarray(nccl_Q)
        generation = self.sheet.generation
        stage_s = TWO_STAGE_S.get(generation, USUAL_TWO_STAGE_S) * (ranks > PAIR) * ranks / 8.0
        stage_Q = stage_s * np.minimum(ranks * bytes_Q / TWO_STAGE_BYTES, 1.0) ** 3
        start_s = ALL_REDUCE_S.get(generation, USUAL_ALL_REDUCE_S)
        own_Q = start_s + stage_Q + moved_Q / min(rate, OWN_BYTES_PER_S)
        if software in PUSHES and generation in PUSH_S:
            own_Q = np.minimum(own_Q, PUSH_S[generation] + (ranks - 1.0) * bytes_Q / rate)
        return np.asarray(np.minimum(ARRIVAL_S + own_Q, nccl_Q))

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


def on_core_share(machine: ServingMachine, ratio: float) -> ServingMachine:
    """Return a system whose ranks have that share of their cores' time, host work included.

    What came from the datasheet is named in `estimated` of both.
    """
    host = None if machine.host is None else machine.host.stretched(1.0 / ratio)
    return replace(machine, host=host, core_ratio=ratio)


def _measured_experts_s(tables: KernelTables, op: Op) -> Floats | None:
    """Return measured seconds at the measured expert degree, or between the two around it."""
    expert, tokens_Q = int(op.axes["expert"]), np.asarray(op.axes["tokens"])
    curves = _expert_degrees(tables, op)
    if not curves:
        return None
    if len(curves) == 1:
        return curves[0][1].seconds(tokens_Q)
    (low, below), (high, above) = curves
    share = np.log(expert / low) / np.log(high / low)
    log_s_Q = (1.0 - share) * np.log(below.seconds(tokens_Q))
    return np.asarray(np.exp(log_s_Q + share * np.log(above.seconds(tokens_Q))))


def _expert_degrees(tables: KernelTables, op: Op) -> list[tuple[int, SizeCurve]]:
    expert = int(op.axes["expert"])
    # A mean of copies that is not whole is priced as the nearest that is.
    names = ("hidden", "ffn", "top_k", "experts", "tensor")
    sizes = [round(float(op.axes[name])) for name in names]
    dispatched, _, kind = op.kind.rpartition("/")
    if dispatched:
        kind = f"wideep_{dispatched}/{DISPATCHED_LOAD.get(kind, kind)}"
    if "matrices" in op.axes:
        kind = f"{kind}/{UNGATED}"
    for written in WRITTEN.get(op.dtype, (op.dtype,)):
        beginning: Key = (op.software, kind, written, *sizes)
        degrees = tables.last_values("moe", beginning)
        low = [degree for degree in degrees if degree <= expert]
        high = [degree for degree in degrees if degree >= expert]
        curves = [
            (degree, curve)
            for degree in sorted({*low[-1:], *high[:1]})
            if (curve := tables.curve("moe", (*beginning, degree))) is not None
        ]
        if curves:
            return curves
    return []
