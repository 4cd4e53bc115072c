"""Properties of a recording that a user may set, because its source lacks or misstates them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Facts beside the counts; what is left empty is taken from the source.

    Raises:
        ValueError: a number that no recording can have.
    """

    model: str = ""
    workload: str = ""
    layer_ids: tuple[int, ...] = ()
    """Absolute decoder layers of the source's rows: of all rows, or of those with tokens."""
    top_k: int | None = None
    num_experts: int | None = None
    """Experts of a layer, for traces that list only the chosen ones."""

    def __post_init__(self) -> None:
        for name, value in (("top_k", self.top_k), ("experts", self.num_experts)):
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} is not at least 1")
        if (
            list(self.layer_ids) != sorted(set(self.layer_ids))
            or min(self.layer_ids, default=0) < 0
        ):
            raise ValueError(f"layer ids {shown(self.layer_ids)} do not ascend from 0 on")


def shown(ids: tuple[int, ...]) -> str:
    """A few of them, for a message."""
    few = ", ".join(str(each) for each in ids[:8])
    return f"{few}, ... ({len(ids)} in all)" if len(ids) > 8 else few or "none"
