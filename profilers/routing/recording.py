"""A recording of routing: how many token copies went to each expert, pass by pass.

    P passes   L recorded MoE layers   E experts   K experts of a token   S source ranks
    M = L - 1 pairs of consecutive recorded layers   T sampled tokens

Only counts are required; what else a source holds is kept where it is known and None where not.
Ids are logical experts throughout: importers undo an engine's own placement.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """Routing of one workload through one model.

    Raises:
        ValueError: a shape disagrees with the counts, or a count is negative.
    """

    model: str
    """Model name of the source; empty where it gives none."""
    workload: str
    """Kind of tokens: a domain, a data set, a traffic class."""
    layer_ids: tuple[int, ...]
    """Absolute decoder layers of the recorded MoE layers, ascending."""
    top_k: int | None
    """Experts of a token; None where the source does not say."""
    count_PLE: Counts
    """Token copies of each expert in each pass; one pass where the source holds totals only."""
    transition_MEE: Floats | None = None
    """Token copies that used e in one recorded layer and f in the next; every pair of choices of a
    token counts one, unless `transition_kind` says otherwise."""
    transition_kind: str = "all_pairs"
    """`all_pairs`, `top1` (best choice to best choice) or `rank_aligned` (k-th to k-th)."""
    token_LTK: npt.NDArray[np.int32] | None = None
    """Chosen experts of sampled tokens, whole tokens through all layers; best choice first where
    the source keeps that order, in order of ids where it does not."""
    num_decoder_layers: int | None = None
    """Decoder layers of the model, dense ones included; None where the source does not say."""

    def __post_init__(self) -> None:
        if self.count_PLE.ndim != 3 or 0 in self.count_PLE.shape:
            raise ValueError("counts are [passes][layers][experts], none of them empty")
        if (self.count_PLE < 0).any():
            raise ValueError("counts must not be negative")
        layers, experts = self.count_PLE.shape[1:]
        shapes = {
            "transition_MEE": (layers - 1, experts, experts),
            "token_LTK": (layers, None, self.top_k),
        }
        if len(self.layer_ids) != layers or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError(f"{layers} layers need as many ascending ids")
        if self.num_decoder_layers is not None and self.layer_ids[-1] >= self.num_decoder_layers:
            raise ValueError(
                f"layer {self.layer_ids[-1]} of a model of {self.num_decoder_layers} decoder layers"
            )
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array is not None and not _fits(array.shape, shape):
                raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    @property
    def num_passes(self) -> int:
        """P."""
        return int(self.count_PLE.shape[0])

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.count_PLE.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.count_PLE.shape[2])

    @property
    def count_LE(self) -> Counts:
        """Token copies over all passes."""
        return np.asarray(self.count_PLE.sum(axis=0), dtype=np.int64)


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        want is None or size == want for size, want in zip(shape, wanted, strict=True)
    )
