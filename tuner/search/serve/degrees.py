"""Parallel degrees by which one instance may be split over the devices of a pool.

    attention    tensor ranks inside a scale-up domain, times data ranks where there are experts
    experts      whole on ranks, or each sliced over all of them
    layers       in stages of a pipeline, where devices are joined by no more than a bus, or no
                 scale-up domain holds the model; not beside data ranks, which no described release
                 puts into stages

Instances are powers of two up to 64 devices; beside them, where ranks of experts may hold copies
(expert_copies.py) or divide the experts anyhow, three or nine times a power of two machines and the
whole pool, up to 72 devices: 12 and 72 of machines of four, 24, 48 and 72 of machines of eight.
DeepEP has settings for three and six times eight ranks (`DEEPEP_RANKS`), SGLang published nine.
Tensor degrees of dense networks may be any that divide heads, key-value heads and network: engines
take no others, and few models have such (40 heads, 10 of keys and values, in five).
Heads, experts and layers must allow all degrees.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tuner.costs.serve.decoder import Decoder
from tuner.costs.serve.engine import InstanceDegrees
from tuner.devices.datasheet import Datasheet
from tuner.spec.cluster import Pool

LARGEST_INSTANCE: Final = 72
"""Largest number of devices of an instance."""
ODD_MACHINES: Final = (3, 9)
"""Machines of an instance, and twice, four times, ... as many."""
BUS_BYTES_PER_S: Final = 64e9
"""Bytes a second in one direction of the fastest bus that cards without links of their own share:
PCI Express 5.0 x16 (PCI-SIG, 32 GT/s a lane)."""
LEAST_SLICE: Final = 128
"""Columns of a sliced expert; narrower ones fill no tile of a tensor core."""


def instance_degrees(
    pool: Pool, decoder: Decoder, *, has_copies: bool = False
) -> Iterator[InstanceDegrees]:
    """Yield every split, small instances first; pipelines after all others.

    Args:
        pool: whose devices are split.
        decoder: the model.
        has_copies: ranks may hold copies of experts, so that they need not divide them.
    """
    most_devices = min(pool.num_devices, LARGEST_INSTANCE)
    tensors = _tensors(decoder, min(most_devices, pool.domain))
    for devices in sorted({*_powers(most_devices), *_odd(pool, most_devices), *tensors}):
        for tensor in tensors:
            data, rest = divmod(devices, tensor)
            if rest == 0 and (data == 1 or decoder.experts is not None):
                yield from _experts(
                    decoder, tensor=tensor, data=data, stages=1, has_copies=has_copies
                )
    for stages in _powers(min(most_devices, decoder.most_stages))[1:]:
        for tensor in tensors:
            if tensor * stages <= most_devices:
                yield from _experts(decoder, tensor=tensor, data=1, stages=stages)


def spread_degrees(pool: Pool, decoder: Decoder) -> Iterator[InstanceDegrees]:
    """Yield pipelines with every stage on a machine of its own, which it leaves room on."""
    for stages in _powers(min(pool.nodes, decoder.most_stages))[1:]:
        for tensor in _tensors(decoder, min(pool.devices_per_node - 1, pool.domain)):
            if tensor * stages <= LARGEST_INSTANCE:
                for degrees in _experts(decoder, tensor=tensor, data=1, stages=stages):
                    yield replace(degrees, stage_machines=stages)


def has_slow_links(sheet: Datasheet, pool: Pool) -> bool:
    """Return whether tensor ranks of one machine have but a bus between them."""
    is_split = pool.domain < pool.devices_per_node
    return is_split or sheet.scale_up_bytes_per_s <= BUS_BYTES_PER_S


def _odd(pool: Pool, most_devices: int) -> Iterator[int]:
    """Yield the devices of whole machines, where they are worth a try and no power of two."""
    for machines in (
        *(odd * power for odd in ODD_MACHINES for power in _powers(most_devices)),
        pool.nodes,
    ):
        if machines * pool.devices_per_node <= most_devices:
            yield machines * pool.devices_per_node


def _tensors(decoder: Decoder, most_ranks: int) -> list[int]:
    """Return the tensor degrees that the model allows."""
    networks = {group.dense_ffn for group in decoder.layers}
    is_odd = decoder.experts is None
    return [
        ranks
        for ranks in range(1, most_ranks + 1)
        if (ranks & (ranks - 1) == 0 or (is_odd and not any(width % ranks for width in networks)))
        and decoder.is_split_by(ranks)
    ]


def _powers(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length())]


def _experts(
    decoder: Decoder, *, tensor: int, data: int, stages: int, has_copies: bool = False
) -> Iterator[InstanceDegrees]:
    experts, ranks = decoder.experts, tensor * data
    if experts is None or ranks == 1:
        yield InstanceDegrees(attention_tensor=tensor, attention_data=data, pipeline=stages)
        return
    if experts.num % ranks == 0 or has_copies:
        yield InstanceDegrees(
            attention_tensor=tensor, attention_data=data, expert=ranks, pipeline=stages
        )
    if data == 1 and experts.ffn % (LEAST_SLICE * ranks) == 0:
        yield InstanceDegrees(
            attention_tensor=tensor, attention_data=data, moe_tensor=ranks, pipeline=stages
        )
