"""The nodes of a job: those it runs on, lost ones in repair, spare ones.

A node is known by its slot. A spare node takes the slot of a lost one; where none is left the slot
stays empty, and the nodes that are back fill those slots first that were emptied first. A layout of
fewer nodes runs on the first slots that are not empty, and replaces a lost node by one that it
leaves idle, at the same place."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Allocation:
    """Nodes of a job; mutable, as they are lost and repaired."""

    nodes: int | None
    """Slots; None: lost nodes are counted, not told apart."""
    spare_nodes: int = 0
    idle_nodes: int | None = None
    """That the layout of fewer nodes leaves; None: there is no such layout."""
    places: list[int] = field(init=False)
    """Slots in use, in the order of ranks."""
    is_full: bool = True
    """Whether the layout in use is that of all nodes."""
    _repairs: list[float] = field(default_factory=list)
    """When each node in repair is back, a heap."""
    _empty: list[int] = field(default_factory=list)
    """Slots without a node, in the order in which they were emptied."""

    def __post_init__(self) -> None:
        self.places = list(range(self.nodes or 0))

    def uses(self, node: int | None) -> bool:
        """Whether a slot is in use; those that are not told apart are."""
        return node is None or self.nodes is None or node in self.places

    def neighbours(self, node: int, count: int) -> list[int]:
        """Return slots from one on around the ring of those in use, it included."""
        place = self.places.index(node)
        return [self.places[(place + one) % len(self.places)] for one in range(count)]

    def lose(self, lost: Sequence[int | None], *, back_at_s: float) -> None:
        """Take nodes out until they are repaired."""
        for node in lost:
            heapq.heappush(self._repairs, back_at_s)
            if node is not None and node not in self._empty:
                self._empty.append(node)

    def short(self, now_s: float) -> int:
        """Count the nodes in repair beyond the spare ones."""
        while self._repairs and self._repairs[0] <= now_s:
            heapq.heappop(self._repairs)
        count = max(0, len(self._repairs) - self.spare_nodes)
        self._empty = self._empty[-count:] if count else []
        return count

    def ready_at_s(self, now_s: float) -> float:
        """Return when there are nodes for a launch in one of the layouts, now at the earliest."""
        allowed = 0 if self.idle_nodes is None else 1 + self.idle_nodes
        return self._no_shorter_at_s(now_s, than=allowed)

    def full_at_s(self, now_s: float) -> float:
        """Return when there is a node for every slot, now at the earliest."""
        return self._no_shorter_at_s(now_s, than=0)

    def _no_shorter_at_s(self, now_s: float, *, than: int) -> float:
        excess = self.short(now_s) - than
        return now_s if excess <= 0 else heapq.nsmallest(excess, self._repairs)[-1]

    def allocate(self, now_s: float) -> bool:
        """Choose the nodes of the next launch; return whether its layout is another one.

        Raises:
            ValueError: neither layout has enough.
        """
        was_full, is_full = self.is_full, self.short(now_s) == 0
        if not is_full and self.idle_nodes is None:
            raise ValueError("too few nodes: wait until ready_at_s")
        self.is_full = is_full
        if self.nodes is None or (is_full and was_full):
            return is_full is not was_full
        everyone = range(self.nodes)
        if is_full:
            self.places = list(everyone)
            return True
        usable = [slot for slot in everyone if slot not in self._empty]
        if was_full:
            assert self.idle_nodes is not None
            self.places = usable[: self.nodes - 1 - self.idle_nodes]
            return True
        idle = iter([slot for slot in usable if slot not in self.places])
        self.places = [slot if slot in usable else next(idle) for slot in self.places]
        return False
