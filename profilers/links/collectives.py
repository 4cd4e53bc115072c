"""Collectives over the groups of a shape, all groups at once.

Bytes are counted as NCCL's tests count them, per rank:

    send_recv         what each rank sends to the next of its group while it receives as much
    all_reduce        the buffer that is reduced
    all_gather        the buffer that is gathered into, all ranks' parts
    reduce_scatter    the buffer that is scattered, all ranks' parts
    all_to_all        the buffer that is sent, all ranks' parts, one's own among them
    all_to_all_uneven likewise; the group's first rank receives 2.5 times the mean share (at most
                      four fifths of everything), the others the rest evenly
    all_to_all_hierarchical  likewise, in two stages; of older profiles, read by nothing

Elements are fp32. A message is cut down to whole elements per rank; the case keeps the requested
size.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.distributed as dist

ELEMENT_BYTES = 4
UNEVEN_RATIO = 2.5
MAX_SHARE = 0.8

# PyTorch renamed these two and warns on the old names; older releases have only those.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Run = Callable[[], object]


def prepare(kind: str, *, size: int, group: dist.ProcessGroup, device: torch.device) -> Run:
    """Allocate the buffers of one collective; running it needs every rank of the group.

    Raises:
        ValueError: the kind does not exist.
    """
    if kind not in BUILDERS:
        raise ValueError(f"collective {kind!r} is not one of {', '.join(BUILDERS)}")
    return BUILDERS[kind](elements_per_rank(size, ranks=group.size()), group, device)


def elements_per_rank(size: int, *, ranks: int) -> int:
    """Elements of a message for each rank: whole ones, and one at least."""
    return max(1, size // ELEMENT_BYTES // ranks)


def filled(elements: int, device: torch.device) -> torch.Tensor:
    """A buffer of noise."""
    return torch.randn(elements, device=device)


def uneven_shares(total: int, *, ranks: int) -> tuple[int, ...]:
    """Elements for each receiver: the first gets most, the rest is even; they sum to `total`."""
    first = int(total * min(UNEVEN_RATIO / ranks, MAX_SHARE))
    share, surplus = divmod(total - first, ranks - 1)
    return (first, *(share + (place < surplus) for place in range(ranks - 1)))


def _send_recv(per_rank: int, group: dist.ProcessGroup, device: torch.device) -> Run:
    sent, received = (
        filled(per_rank * group.size(), device),
        filled(per_rank * group.size(), device),
    )
    here = group.rank()
    after = dist.get_global_rank(group, (here + 1) % group.size())
    before = dist.get_global_rank(group, (here - 1) % group.size())

    def run() -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, after, group),
                dist.P2POp(dist.irecv, received, before, group),
            ]
        )
        for work in works:
            work.wait()

    return run


def _all_reduce(per_rank: int, group: dist.ProcessGroup, device: torch.device) -> Run:
    # Zeros stay zeros: a buffer summed into itself repeatedly would overflow.
    buffer = torch.zeros(per_rank * group.size(), device=device)
    return lambda: dist.all_reduce(buffer, group=group)


def _all_gather_run(per_rank: int, group: dist.ProcessGroup, device: torch.device) -> Run:
    part, whole = filled(per_rank, device), filled(per_rank * group.size(), device)
    return lambda: _all_gather(whole, part, group=group)


def _reduce_scatter_run(per_rank: int, group: dist.ProcessGroup, device: torch.device) -> Run:
    part, whole = filled(per_rank, device), filled(per_rank * group.size(), device)
    return lambda: _reduce_scatter(part, whole, group=group)


def _all_to_all(per_rank: int, group: dist.ProcessGroup, device: torch.device) -> Run:
    total = per_rank * group.size()
    sent, received = filled(total, device), filled(total, device)
    return lambda: dist.all_to_all_single(received, sent, group=group)


def _all_to_all_uneven(per_rank: int, group: dist.ProcessGroup, device: torch.device) -> Run:
    ranks = group.size()
    shares = list(uneven_shares(per_rank * ranks, ranks=ranks))
    mine = [shares[group.rank()]] * ranks
    sent, received = filled(sum(shares), device), filled(sum(mine), device)
    return lambda: dist.all_to_all_single(
        received, sent, output_split_sizes=mine, input_split_sizes=shares, group=group
    )


BUILDERS: Final[Mapping[str, Callable[[int, dist.ProcessGroup, torch.device], Run]]] = {
    "send_recv": _send_recv,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather_run,
    "reduce_scatter": _reduce_scatter_run,
    "all_to_all": _all_to_all,
    "all_to_all_uneven": _all_to_all_uneven,
}
