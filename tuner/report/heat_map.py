"""Heat maps of rank loads, as SVG and as numbers: one row per layer, one column per rank.

    L layers   G ranks   R rows and C columns drawn

A cell is a rank's load over the mean of its layer: 1 is perfect. Panels that are compared, such as
before and after, share one colour scale: blue below 1, white at 1, red above. A map with more
layers or ranks than fit is drawn in blocks, each showing its largest load, so that hot ranks stay
visible; the JSON has every number.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats

MOST_ROWS: Final = 128
MOST_COLUMNS: Final = 256
"""Cells drawn at most, which bounds the picture's size."""

SHADES: Final = 24
"""Steps of colour on each side of 1."""

_BELOW: Final = (33, 102, 172)
_EVEN: Final = (247, 247, 247)
_ABOVE: Final = (178, 24, 43)
"""Ends and middle of ColorBrewer's RdBu, which is colour-blind safe."""

_PANEL_WIDTH: Final = 480.0
_PANEL_HEIGHT: Final = 420.0
_LARGEST_CELL: Final = 18.0
_MARGIN: Final = 56.0
_LEGEND_HEIGHT: Final = 64.0
_STYLE: Final = 'font-family="sans-serif" font-size="12" fill="#222222"'


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeatMap:
    """Loads to be compared.

    Raises:
        ValueError: there is no panel, a panel has another shape, or a load is not a number from 0.
    """

    title: str
    """Title, e.g. the workload's name."""
    layer_ids: tuple[int, ...]
    """Decoder layer of each row."""
    panels: Mapping[str, Floats]
    """By name, in order: `[L][G]` loads over the layer's mean."""

    def __post_init__(self) -> None:
        shapes = {panel.shape for panel in self.panels.values()}
        if len(shapes) != 1:
            raise ValueError(f"panels need one shape, not {sorted(shapes)}")
        (shape,) = shapes
        if len(shape) != 2 or 0 in shape or shape[0] != len(self.layer_ids):
            raise ValueError(f"{len(self.layer_ids)} layers, but panels of shape {shape}")
        for panel in self.panels.values():
            if not np.isfinite(panel).all() or (panel < 0.0).any():
                raise ValueError("loads must be non-negative numbers")


def heat_map_json(heat: HeatMap) -> str:
    """Return the numbers: `title`, `layer_ids`, and by panel `load_ratio` [layers][ranks]."""
    panels = {
        name: {
            "load_ratio": [[float(f"{load:.6g}") for load in row] for row in panel.tolist()],
            "largest_ratio": float(f"{panel.max():.6g}"),
            "mean_of_largest_ratio": float(f"{panel.max(axis=1).mean():.6g}"),
        }
        for name, panel in heat.panels.items()
    }
    record = {"title": heat.title, "layer_ids": list(heat.layer_ids), "panels": panels}
    return json.dumps(record, allow_nan=False) + "\n"


def heat_map_svg(heat: HeatMap) -> str:
    """Return a self-contained SVG; names are escaped."""
    (layers, ranks) = next(iter(heat.panels.values())).shape
    most_ratio = max(1.0, *(float(panel.max()) for panel in heat.panels.values()))
    rows, columns = min(layers, MOST_ROWS), min(ranks, MOST_COLUMNS)
    cell_width = min(_LARGEST_CELL, _PANEL_WIDTH / columns)
    cell_height = min(_LARGEST_CELL, _PANEL_HEIGHT / rows)
    width = max(columns * cell_width, 180.0)
    step = width + _MARGIN
    total_width = _MARGIN + step * len(heat.panels)
    top = 72.0
    total_height = top + rows * cell_height + 32.0 + _LEGEND_HEIGHT
    described = "; ".join(
        f"{name}: mean over layers of the largest {panel.max(axis=1).mean():.3f}, largest"
        f" {panel.max():.3f}"
        for name, panel in heat.panels.items()
    )
    reduced = "" if (rows, columns) == (layers, ranks) else " Blocks show their largest load."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_width:.0f}"'
        f' height="{total_height:.0f}" viewBox="0 0 {total_width:.0f} {total_height:.0f}"'
        ' role="img" aria-labelledby="title description">',
        f'<title id="title">{_text("Rank loads of " + heat.title)}</title>',
        f'<desc id="description">Load of {ranks} ranks in {layers} layers over the layer&apos;s'
        f" mean. {_text(described)}.{reduced}</desc>",
        f'<rect width="100%" height="100%" fill="#ffffff"/><g {_STYLE}>',
        f'<text x="{_MARGIN}" y="24" font-size="15">{_text(heat.title)}</text>',
    ]
    for place, (name, panel) in enumerate(heat.panels.items()):
        parts.append(f'<g transform="translate({_MARGIN + place * step:.1f} {top})">')
        parts.append(
            f'<text y="-26">{_text(name)}</text><text y="-10" font-size="11">largest'
            f" {panel.max():.3f}, mean of largest {panel.max(axis=1).mean():.3f}</text>"
        )
        parts.append(
            f'<g transform="scale({cell_width:.4f} {cell_height:.4f})"'
            ' shape-rendering="crispEdges">'
        )
        parts.extend(_cells(blocks(panel, rows, columns), most_ratio))
        parts.append("</g>")
        parts.extend(_axes(heat.layer_ids, ranks, rows * cell_height, columns * cell_width))
        parts.append("</g>")
    parts.append(f'<g transform="translate({_MARGIN} {total_height - _LEGEND_HEIGHT + 12.0:.1f})">')
    parts.extend(_legend(most_ratio))
    parts.append("</g></g></svg>\n")
    return "\n".join(parts)


def blocks(panel_LG: Floats, rows: int, columns: int) -> Floats:
    """Return the largest load of each of R x C blocks of neighbours."""
    layers, ranks = panel_LG.shape
    first_row = np.arange(rows) * layers // rows
    first_column = np.arange(columns) * ranks // columns
    by_row = np.maximum.reduceat(panel_LG, first_row, axis=0)
    blocks_RC: Floats = np.maximum.reduceat(by_row, first_column, axis=1)
    return blocks_RC


def _cells(blocks_RC: Floats, most_ratio: float) -> Iterator[str]:
    """Yield one path per shade: its cells, joined to runs along each row."""
    shade_RC = _shade(blocks_RC, most_ratio)
    for shade in np.unique(shade_RC).tolist():
        runs = []
        for row, hit_C in enumerate(shade_RC == shade):
            edges = np.flatnonzero(np.diff(np.concatenate(([0], hit_C.astype(np.int8), [0]))))
            runs += [
                f"M{first} {row}h{end - first}v1h{first - end}z"
                for first, end in edges.reshape(-1, 2).tolist()
            ]
        yield f'<path fill="{_colour(shade)}" d="{"".join(runs)}"/>'


def _shade(ratio: Floats, most_ratio: float) -> npt.NDArray[np.int64]:
    """Return the step of colour: 0 at 1, `SHADES` at the largest, `-SHADES` at no load."""
    above = (ratio - 1.0) / max(most_ratio - 1.0, 1e-9)
    steps: Floats = np.rint(SHADES * np.where(ratio > 1.0, above, ratio - 1.0))
    return steps.astype(np.int64)


def _colour(shade: int) -> str:
    end = _ABOVE if shade > 0 else _BELOW
    # The square root makes small differences near 1 visible.
    share = math.sqrt(abs(shade) / SHADES)
    mixed = (round(e + (to - e) * share) for e, to in zip(_EVEN, end, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _axes(layer_ids: tuple[int, ...], ranks: int, height: float, width: float) -> Iterator[str]:
    last = len(layer_ids) - 1
    for place in sorted({0, last // 2, last}):
        y = (place + 0.5) / (last + 1) * height + 4.0
        yield f'<text x="-6" y="{y:.1f}" text-anchor="end" font-size="10">{layer_ids[place]}</text>'
    yield (
        f'<text transform="translate(-36 {height / 2:.1f}) rotate(-90)" text-anchor="middle"'
        ' font-size="11">layer</text>'
    )
    yield f'<text y="{height + 14:.1f}" font-size="10">0</text>'
    if ranks > 1:
        yield (
            f'<text x="{width:.1f}" y="{height + 14:.1f}" text-anchor="end" font-size="10">'
            f"{ranks - 1}</text>"
        )
    yield (
        f'<text x="{width / 2:.1f}" y="{height + 14:.1f}" text-anchor="middle" font-size="11">'
        "rank</text>"
    )


def _legend(most_ratio: float) -> Iterator[str]:
    shades = range(-SHADES, SHADES + 1)
    each = 240.0 / len(shades)
    for place, shade in enumerate(shades):
        yield (
            f'<rect x="{place * each:.2f}" width="{each + 0.5:.2f}" height="12"'
            f' fill="{_colour(shade)}"/>'
        )
    for x, anchor, text in ((0, "start", "0"), (120, "middle", "1"), (240, "end", "")):
        label = text or f"{most_ratio:.2f}"
        yield f'<text x="{x}" y="26" text-anchor="{anchor}" font-size="10">{label}</text>'
    yield '<text x="252" y="11" font-size="11">load over the mean</text>'


def _text(text: str) -> str:
    """Return the text escaped for XML; unprintable characters become '?'."""
    return escape("".join(letter if letter.isprintable() else "?" for letter in text))
