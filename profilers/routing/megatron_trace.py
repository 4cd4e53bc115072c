"""Megatron-LM's routing trace: what `--moe-routing-trace-path` writes in training and inference.

One `router_trace_rank<r>.jsonl` a rank, one record a line, in order of time:

    {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
     "num_tokens": 128, "topk": 22, "top_indices": [[12, 45, ...], ...]}

Records of one rank that follow each other with ascending layers are one forward of the same tokens;
a step of training has one for each microbatch. A trace may be larger than memory: it is read line
by line, a forward at a time, and kept as counts (profilers/routing/tally.py says how that stays
bounded).

Source: NVIDIA/Megatron-LM at d98e8a6, megatron/core/transformer/moe/router_trace.py. Where the
router hands on a mask, the ids of a token ascend; they are not in order of its preference.

The trace does not say how many experts there are: it is taken from the largest chosen id, unless
the user does. Nor does it number layers across pipeline stages: each stage counts its own from 0,
so the traces of one stage are read at a time, with --layer-ids. Ranks of one tensor-parallel group
without sequence parallelism record the same tokens, which leaves the shares as they are.

Not covered: the layers of multi-token prediction (`block` is not `decoder`), hidden states and
logits beside the trace.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, ValidationError

from profilers.errors import first_problem
from profilers.files import open_regular
from profilers.routing.recording import MOST_EXPERTS, Counts, Recording, numbers
from profilers.routing.tally import ABSENT, Tally

TRACES: Final = "router_trace_rank*.jsonl"
MOST_LINE_BYTES: Final = 2**25
"""One layer's choices in one forward: 400,000 tokens of 16 choices."""
MOST_CELLS: Final = 2**24
"""Counts in memory: 128 MiB; more passes than fit are merged into coarser ones."""

Whole = Annotated[int, Field(ge=0)]


class _Line(BaseModel, strict=True):
    """One layer of one forward; what else a line says is not read."""

    step: Whole
    layer: Whole
    rank: Whole
    block: str = "decoder"
    top_indices: Any


def read(path: Path) -> Recording:
    """Read the trace of one rank, or a folder with those of several.

    Raises:
        ValueError: a line is cut short, too long, or no such record.
    """
    tally = Tally(most_cells=MOST_CELLS)
    for file in sorted(path.glob(TRACES)) if path.is_dir() else [path]:
        forward: dict[int, Counts] = {}
        before = (-1, -1, -1)
        for where, line in _lines(file):
            now = (line.step, line.rank, line.layer)
            if now[:2] != before[:2] or now <= before:
                tally.add(forward, number=before[0])
                forward = {}
            before = now
            # A rank may have no token of a layer.
            if line.top_indices != []:
                forward[line.layer] = numbers(
                    line.top_indices,
                    what=f"{where}: top_indices",
                    axes="tokens choices",
                    least=ABSENT,
                    largest=MOST_EXPERTS - 1,
                )
        tally.add(forward, number=before[0])
    return tally.recording()


def _lines(file: Path) -> Iterator[tuple[str, _Line]]:
    """Yield where each line of the decoder's layers is, and what it says."""
    with open_regular(file) as stream:
        for number, text in enumerate(iter(lambda: stream.readline(MOST_LINE_BYTES + 1), b""), 1):
            where = f"{file.name} line {number}"
            if len(text) > MOST_LINE_BYTES:
                raise ValueError(
                    f"{where} has more than {MOST_LINE_BYTES} bytes; a record is one layer of one"
                    " forward"
                )
            if not text.strip():
                continue
            try:
                line = _Line.model_validate_json(text)
            except ValidationError as error:
                raise ValueError(
                    f"{where}: {first_problem(error)}; remove a line that was cut short"
                ) from error
            if line.block == "decoder":
                yield where, line
