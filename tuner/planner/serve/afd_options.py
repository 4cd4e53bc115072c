"""Cells that a release launches: attention servers with an FFN server each, as decode options.

    A = r F attention devices, F devices of the FFN server, which divide the experts; r up to 8, and
    1/2 and 1/4, which only say what the plugin's rule costs; or both sides T x D

A cell is one decode option of A + F devices of one pool, so that the program of prefill and decode,
its routes, the simulation and the spare capacity are those of the disaggregated mode. A step is
tuner/costs/serving/remote_ffn.py's. Where A + F devices lie in one scale-up domain messages take
its links, else each device's share of the network cards.

Steps hold at most 1,024 tokens, since prompts are read elsewhere: the FFN server must have room for
the steps of all its peers together.

Not covered: cells over two pools; numbers of attention devices that are no multiple of F, which the
plugin takes; experts that are sliced; the spread of a cell over domains that hold a side whole.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from tuner.costs.serving.decoder import Decoder, Formats
from tuner.costs.serving.engine import Degrees, Engine, Exchange
from tuner.costs.serving.expert_loads import ExpertLoads
from tuner.costs.serving.iteration import Iteration
from tuner.costs.serving.remote_ffn import (
    RemoteFfnIteration,
    attention_only,
    ffn_fits,
    peer_link,
)
from tuner.planner.serve.choices import Budget
from tuner.planner.serve.demand import MOST_RUNNING, Demand
from tuner.planner.serve.dominance import undominated
from tuner.planner.serve.expert_copies import ExpertCopies
from tuner.planner.serve.options import Option, PoolSite, decode_options
from tuner.spec.cluster import Pool

LARGEST_SIDE: Final = 64
"""Devices of one role in a cell."""
PEERS: Final = (1, 2, 3, 4, 6, 8)
"""Attention devices of an FFN device."""
FEWER: Final = (2, 4)
"""FFN devices of an attention device, beyond one."""
BUDGET: Final = Budget(tokens=MOST_RUNNING, is_chunked=True)
NO_FFN_ROOM: Final = "no memory for the experts of a cell beside the steps of its attention devices"

Refuse = Callable[[Option], str]
"""Says in a line why a release does not launch a cell; empty: it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedCells:
    """What was found."""

    options: tuple[Option, ...] = ()
    refused: tuple[Option, ...] = ()
    """Those that serve, and that the release refuses."""
    illegal_by: Mapping[str, int] = field(default_factory=dict)
    """Cells that cannot serve or are refused, by what stands in the way, most first."""


def priced_cells(
    sites: tuple[PoolSite, ...],
    *,
    decoder: Decoder,
    formats: Formats,
    engine: Engine,
    demand: Demand,
    loads: ExpertLoads | None,
    page_of_pool: Mapping[str, int],
    refuse: Refuse,
) -> PricedCells:
    """Price every cell, and part those that the release refuses.

    Args:
        sites: pools; a cell stands on one of them.
        decoder: the model.
        formats: its storage.
        engine: that serves.
        demand: the traffic.
        loads: of the experts, as recorded; None: those of the kernel tables.
        page_of_pool: tokens of a page, where it is not the engine's own.
        refuse: called with every cell that serves.
    """
    launched: list[Option] = []
    refused: list[Option] = []
    illegal: Counter[str] = Counter()
    for site in sites:
        for own, ffn_degrees in sides_of(site.pool, decoder):
            ffn = Iteration(
                decoder=decoder,
                formats=formats,
                degrees=ffn_degrees,
                engine=engine,
                machine=site.machine,
                exchange=Exchange.ALLGATHER,
                loads=_borne(loads, decoder, ranks=ffn_degrees.expert),
            )
            if not _has_room(ffn, site, peers=own.devices / ffn_degrees.devices, running=1):
                illegal[NO_FFN_ROOM] += 1
                continue
            for halves in (False, True)[: 1 + (own.attention_data > 1)]:
                cell = remote_ffn_step(ffn, own, site, halves=halves)
                made, reason = decode_options(
                    site,
                    cell,
                    budget=BUDGET,
                    demand=demand,
                    page_tokens=page_of_pool.get(site.pool.name),
                )
                illegal.update([reason] if reason else [])
                for option in made:
                    if not _has_room(ffn, site, peers=cell.peers, running=option.running):
                        illegal[NO_FFN_ROOM] += 1
                    elif answer := refuse(option):
                        illegal[answer] += 1
                        refused.append(option)
                    else:
                        launched.append(option)
    return PricedCells(
        options=undominated(launched),
        refused=undominated(refused),
        illegal_by=dict(illegal.most_common()),
    )


def sides_of(pool: Pool, decoder: Decoder) -> Iterator[tuple[Degrees, Degrees]]:
    """Yield the degrees of attention and FFN servers that a pool has devices for."""
    experts = decoder.experts
    if experts is None:
        return
    most = min(LARGEST_SIDE, pool.num_devices)
    whole = [ranks for ranks in range(1, most + 1) if experts.num % ranks == 0]
    for ffn in whole:
        several = {ffn * peers for peers in PEERS}
        fewer = {ffn // share for share in FEWER if ffn % share == 0}
        for attention in sorted(several | fewer):
            if attention <= LARGEST_SIDE and attention + ffn <= pool.num_devices:
                yield Degrees(attention_data=attention), Degrees(attention_data=ffn, expert=ffn)
    heads = min(group.attention.heads for group in decoder.layers)
    for tensor in (2, 4, 8):
        for ranks in whole:
            is_split = ranks % tensor == 0 and heads % tensor == 0 and tensor <= pool.domain
            if is_split and 2 * ranks <= pool.num_devices:
                own = Degrees(attention_tensor=tensor, attention_data=ranks // tensor)
                yield (
                    own,
                    Degrees(attention_tensor=tensor, attention_data=ranks // tensor, expert=ranks),
                )


def remote_ffn_step(
    ffn: Iteration, own: Degrees, site: PoolSite, *, halves: bool
) -> RemoteFfnIteration:
    """Return the steps of attention servers with such an FFN server, both on one pool.

    Args:
        ffn: the server of the networks.
        own: degrees of the attention server.
        site: where both stand.
        halves: batches run as two halves.
    """
    pool, sheet = site.pool, site.machine.sheet
    card = (pool.nic or sheet.scale_out_bytes_per_s) / pool.oversubscription
    link = peer_link(
        inside_bytes_per_s=sheet.scale_up_bytes_per_s,
        card_bytes_per_s=card * pool.nics / pool.devices_per_node,
        is_inside=own.devices + ffn.degrees.devices <= pool.domain,
    )
    return RemoteFfnIteration(
        decoder=attention_only(ffn.decoder),
        formats=ffn.formats,
        degrees=own,
        engine=ffn.engine,
        machine=site.machine,
        two_batch_overlap=halves,
        ffn=ffn,
        link=link,
    )


def _has_room(ffn: Iteration, site: PoolSite, *, peers: float, running: int) -> bool:
    several = max(peers, 1.0)
    return ffn_fits(
        ffn,
        memory_bytes=site.memory_bytes,
        step_tokens=round(several * BUDGET.tokens),
        running=round(several * running),
    )


def _borne(loads: ExpertLoads | None, decoder: Decoder, *, ranks: int) -> ExpertLoads | None:
    """Return what the ranks of an FFN server bear; it keeps no copies of experts."""
    own = decoder.experts
    if own is None:
        return None
    return ExpertCopies(loads=loads).borne(own, ranks=ranks, nodes=1, redundant=0)
