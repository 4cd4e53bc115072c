"""Reads dispatcher, overlap, CUDA graph and fusion of a row, or fills them by majority.

A row of a tagged recipe (`recipe_match` is exact or layout, or `a2a_overlap` is given) says all of
them: what is blank is off. Elsewhere each is what most known recipes of the same kind have:

- DeepSeek-V3 and Kimi K2 recompute `mla_up_proj`, but not on GB300; others nothing.
- MoE models on Blackwell run partial CUDA graphs, on Hopper none; dense ones none except in
  NVFP4, which runs full-iteration graphs; from containers 26.06 on, GB200 and GB300 run MoE with
  full-iteration graphs and overlap.
- Blackwell dispatches by HybridEP, Hopper by DeepEP.

Source: the counts over the public recipes of Megatron-Bridge, tags v0.2 to v0.5.
"""

from dataclasses import dataclass, field
from typing import Final

from tuner.backtest.engines import identify_engine, parse_precision
from tuner.backtest.rows import Row
from tuner.costs.train.constants import GemmPrecision
from tuner.costs.train.shapes import ModelShape
from tuner.devices.datasheet import Datasheet, Generation

FULL_GRAPH_FROM = (26, 6)
"""Container from which MoE recipes on racks capture the whole iteration."""
RACK = 72
"""Devices of a rack's scale-up domain."""
_DEEPEP_SOURCES: Final = frozenset({"torchtitan-fork-pr"})
"""Sources whose runs all use DeepEP, though not every row says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFlags:
    """Fields of `Strategies`, and the assumed recomputation."""

    fields: dict[str, float]
    recompute: dict[str, float] = field(default_factory=dict)
    knows_recompute: bool


def read_flags(
    row: Row, shape: ModelShape, device: Datasheet, *, release: str
) -> tuple[RowFlags, tuple[str, ...]]:
    """Return a row's flags, and the columns that a rule filled.

    Raises:
        ValueError: a flag has a value that is not known.
    """
    is_known = "a2a_overlap" in row.flags or row.text("recipe_match") in ("exact", "layout")
    is_tagged = identify_engine(row)[0].family == "nemo"
    if is_known or not is_tagged:
        return _as_printed(row, shape, is_known=is_known)
    return _majority(row, shape, device, release=release)


def _as_printed(row: Row, shape: ModelShape, *, is_known: bool) -> tuple[RowFlags, tuple[str, ...]]:
    dispatcher = row.text("dispatcher").lower()
    notes = row.text("notes").lower()
    if dispatcher not in ("", "alltoall", "allgather", "flex", "deepep", "hybridep"):
        raise ValueError(f"dispatcher {dispatcher[:40]!r} is none of alltoall, deepep, hybridep")
    graph, scope = row.text("cuda_graph").lower(), row.text("cuda_graph_scope").lower()
    if graph not in ("", "none", "local", "transformer_engine", "full_iteration"):
        raise ValueError(
            f"cuda_graph {graph[:40]!r} is none of none, local, transformer_engine, full_iteration"
        )
    is_full = graph == "full_iteration" or (graph == "local" and scope == "full_iteration")
    has_experts = bool(shape.experts)
    fields = {
        "a2a_overlap": float(
            has_experts and row.flags.get("a2a_overlap", "ep overlap on" in notes)
        ),
        "is_deepep": float(
            dispatcher == "deepep" or "deepep" in notes or row.text("source") in _DEEPEP_SOURCES
        ),
        "is_hybridep": float(dispatcher == "hybridep" or "hybridep" in notes),
        "full_graph": float(is_full),
        "partial_graph": float(graph in ("local", "transformer_engine") and not is_full),
        "fused_grouped_mlp": float(row.flags.get("fused_grouped_mlp", False)),
    }
    blank: tuple[str, ...] = ()
    if not is_known and has_experts:
        named = {"dispatcher": dispatcher or "ep" in notes, "a2a_overlap": "overlap" in notes}
        blank = tuple(name for name, is_said in named.items() if not is_said)
    return RowFlags(fields=fields, knows_recompute=is_known), blank


def _majority(
    row: Row, shape: ModelShape, device: Datasheet, *, release: str
) -> tuple[RowFlags, tuple[str, ...]]:
    version = tuple(int(part) for part in release.split(".") if part.isdigit())
    is_blackwell = device.generation is Generation.BLACKWELL
    has_experts = bool(shape.experts)
    # Full-iteration graphs are for models of attention alone: every known recipe of a hybrid has
    # partial ones.
    is_whole = not shape.has_linear and (
        parse_precision(row) is GemmPrecision.NVFP4
        if not has_experts
        else version >= FULL_GRAPH_FROM and device.scale_up_domain >= RACK
    )
    is_partial = has_experts and is_blackwell and not is_whole
    fields = {
        "a2a_overlap": float(
            has_experts and (is_whole or "ep overlap on" in row.text("notes").lower())
        ),
        "is_deepep": float(has_experts and not is_blackwell),
        "is_hybridep": float(has_experts and is_blackwell),
        "full_graph": float(is_whole),
        "partial_graph": float(is_partial),
        "fused_grouped_mlp": float(has_experts and is_whole),
    }
    recompute = (
        {"recompute_mla_up_proj": 1.0}
        if shape.is_mla and not device.name.startswith("gb300")
        else {}
    )
    return (
        RowFlags(fields=fields, recompute=recompute, knows_recompute=False),
        ("dispatcher", "a2a_overlap", "cuda_graph", "fused_grouped_mlp"),
    )
