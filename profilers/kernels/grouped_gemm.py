"""The SwiGLU expert network of one rank, exactly as the reference step runs it.

`tokens` rows over `experts`; the most-loaded expert holds `largest` of them and the others share
the rest evenly, the remainder going to the first of them.

Kind `ragged` is the same network out of `torch.nn.functional.grouped_mm`, as engines call it, with
rows that fall otherwise in every call: on a processor oneDNN generates kernels for them (see
profilers/steps/experts.py), which took a third of the experts' time of torchtitan. It is measured
at sizes that a spec asks for only, as are kind `frozen`, whose weights get no gradient, and
`lora16`, the same with adapters of that rank. `lora16-lowest` has no gradient of the rows either,
as where nothing before the experts is trained.
"""

import random as randomness
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from profilers.devices import DTYPES, last_cache_bytes
from profilers.kernels.autograd import Prepared, random, through_autograd
from profilers.records import Case
from profilers.steps.experts import ExpertAdapters, expert_ffn

CPU_SHAPES = ((64, 64), (128, 256), (256, 512))
CPU_EXPERTS = (2, 8)
CPU_TOKENS = (128, 512, 2048)
CUDA_SHAPES = ((2048, 1024), (4096, 2048), (4096, 14336))
CUDA_EXPERTS = (2, 8, 32)
CUDA_TOKENS = (512, 4096, 32768)
RAGGED = "ragged"
ADAPTED = re.compile(r"lora(?P<rank>[1-9][0-9]{0,4})(?P<lowest>-lowest)?")
MOST_MOVED_RATIO = 0.25
"""Largest share of an expert's rows that a ragged call gives to the next expert."""
SKEW = 2
"""Rows of the most-loaded expert over its even share, in an uneven case."""


def cases(device: torch.device, dtypes: Sequence[str]) -> tuple[Case, ...]:
    """List even and uneven loads of every shape; a shape is (hidden, ffn)."""
    on_cuda = device.type == "cuda"
    return tuple(
        Case(
            operation="grouped_gemm",
            dtype=dtype,
            direction="forward",
            axes={
                "experts": experts,
                "tokens": tokens,
                "largest": tokens // experts * skew,
                "hidden": hidden,
                "ffn": ffn,
            },
        )
        for dtype in dtypes
        for hidden, ffn in (CUDA_SHAPES if on_cuda else CPU_SHAPES)
        for experts in (CUDA_EXPERTS if on_cuda else CPU_EXPERTS)
        for tokens in (CUDA_TOKENS if on_cuda else CPU_TOKENS)
        for skew in (1, SKEW)
        if skew < experts
    )


def prepare(case: Case, device: torch.device) -> Prepared:
    """Build rows sorted by expert, and the experts' weights."""
    axes = case.axes
    dtype = DTYPES[case.dtype]
    experts, tokens, hidden, ffn = (axes[a] for a in ("experts", "tokens", "hidden", "ffn"))
    counts = row_counts(experts=experts, tokens=tokens, largest=axes["largest"])
    adapted = ADAPTED.fullmatch(case.kind)
    is_trained = case.kind in ("", RAGGED)

    def operand(*shape: int, grad: bool = True) -> Tensor:
        return random(*shape, dtype=dtype, device=device, grad=grad)

    def operands() -> tuple[Tensor, ...]:
        matrices = ((2 * ffn, hidden), (hidden, ffn))
        factors = []
        for outputs, inputs in matrices if adapted else ():
            rank = int(adapted["rank"]) if adapted else 0
            factors += [operand(experts, rank, inputs), operand(experts, outputs, rank)]
        return (
            operand(tokens, hidden, grad=not (adapted and adapted["lowest"])),
            *(operand(experts, *shape, grad=is_trained) for shape in matrices),
            *factors,
        )

    ragged = redrawn(counts)

    def experts_run(x: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor) -> Tensor:
        if case.kind == RAGGED:
            return _ragged_ffn(x, next(ragged), gate_up, down)
        adapters = None
        if factors:
            a, b, a_down, b_down = factors
            adapters = ExpertAdapters(gate_up=(a, b), down=(a_down, b_down), scale=2.0)
        return expert_ffn(x, counts, gate_up, down, adapters)

    return through_autograd(
        experts_run, operands=operands, device=device, cold_bytes=last_cache_bytes(device)
    )


def redrawn(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield other counts with the same sum: every expert gives some of its rows to the next one."""
    draw = randomness.Random(0)
    while True:
        given = [draw.randint(0, int(count * MOST_MOVED_RATIO)) for count in counts]
        yield tuple(count - given[at] + given[at - 1] for at, count in enumerate(counts))


def _ragged_ffn(x: Tensor, counts: Sequence[int], gate_up: Tensor, down: Tensor) -> Tensor:
    stops = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=x.device)

    def linear(rows: Tensor, weight_EOI: Tensor) -> Tensor:
        return functional.grouped_mm(rows, weight_EOI.transpose(1, 2), offs=stops)

    gate, up = gate_up.chunk(2, dim=1)
    return linear(functional.silu(linear(x, gate)) * linear(x, up), down)


def row_counts(*, experts: int, tokens: int, largest: int) -> tuple[int, ...]:
    """Give `largest` rows to the first expert and the rest evenly to the others.

    Raises:
        ValueError: no such loads exist.
    """
    if experts == 1:
        if largest != tokens:
            raise ValueError(f"one expert holds all {tokens} rows, not {largest}")
        return (tokens,)
    share, surplus = divmod(tokens - largest, experts - 1)
    if largest > tokens or share + bool(surplus) > largest:
        raise ValueError(
            f"{tokens} rows over {experts} experts cannot have {largest} rows in the most loaded"
        )
    return (largest, *(share + (expert < surplus) for expert in range(experts - 1)))
