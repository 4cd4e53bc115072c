"""AFD units that a release launches: attention servers with an FFN server each, as decode options.

    A = r F attention devices, F devices of the FFN server, which divide the experts; r up to 8, and
    1/2 and 1/4, which only say what the plugin's rule costs; or both sides T x D

An AFD unit is one decode option of A + F devices of one pool, so the program of prefill and decode,
its routes, the simulation and the spare capacity are those of the disaggregated mode. A step is
tuner/costs/serve/remote_ffn.py's. Where A + F devices lie in one scale-up domain messages take
its links, else each device's share of the NICs.

Steps hold at most 1,024 tokens, since prompts are prefilled elsewhere: the FFN server must have
room for the steps of all its peers together.

Not covered: AFD units over two pools; numbers of attention devices that are no multiple of F, which
the plugin accepts; expert tensor parallelism; units over several domains that each hold one side.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from tuner.catalog.serve_rules.traits import EngineTraits
from tuner.config.serve import Role
from tuner.costs.serve.decoder import Decoder, Formats
from tuner.costs.serve.engine import A2aBackend, InstanceDegrees
from tuner.costs.serve.expert_loads import ExpertLoads
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.remote_ffn import (
    RemoteFfnIteration,
    attention_only,
    ffn_fits,
)
from tuner.prices.peer_link import peer_link
from tuner.search.serve.choices import TokenBudget
from tuner.search.serve.demand import MOST_RUNNING, Demand
from tuner.search.serve.expert_copies import ExpertCopies
from tuner.search.serve.launchable import pools_by_release, release_refuses
from tuner.search.serve.modes.disaggregated import simulate_slowest
from tuner.search.serve.modes.mode import ServingMode
from tuner.search.serve.options import (
    Option,
    Options,
    Refuse,
    ServingPool,
    decode_options,
    drop_dominated,
    merge_options,
)
from tuner.search.serve.pages import page_by_pool
from tuner.search.serve.problem import ModeSolution, ServeProblem
from tuner.spec.cluster import Pool
from tuner.spec.serving.goal import Mode

NAME: Final[Mode] = "attention_expert"
LARGEST_SIDE: Final = 64
"""Devices of one role in a unit."""
PEERS: Final = (1, 2, 3, 4, 6, 8)
"""Attention devices of an FFN device."""
FEWER: Final = (2, 4)
"""FFN devices of an attention device, beyond one."""
BUDGET: Final = TokenBudget(tokens=MOST_RUNNING, is_chunked=True)
NO_FFN_ROOM: Final = (
    "no memory for the experts of an AFD unit beside the steps of its attention devices"
)


def _price(problem: ServeProblem) -> Options:
    """Price AFD units on pools whose release has them, or else on all, as refused."""
    spec, pools = problem.spec, problem.serving_pools
    having = tuple(pool for pool in pools if NAME in spec.releases[pool.pool.name].modes)
    return merge_options(
        [
            price_afd_options(
                release_pools,
                decoder=problem.decoder,
                formats=problem.formats,
                traits=release.traits,
                release=release.release,
                demand=problem.demand,
                loads=problem.loads,
                page_by_pool=page_by_pool(spec, pools),
                refuse=lambda option: release_refuses(option, spec, mode=NAME),
            )
            for release, release_pools in pools_by_release(spec, having or pools)
        ],
        roles=(Role.DECODE,),
    )


def price_afd_options(
    serving_pools: tuple[ServingPool, ...],
    *,
    decoder: Decoder,
    formats: Formats,
    traits: EngineTraits,
    release: str = "",
    demand: Demand,
    loads: ExpertLoads | None,
    page_by_pool: Mapping[str, int],
    refuse: Refuse,
) -> Options:
    """Price every AFD unit, and separate those that the release refuses.

    Args:
        serving_pools: pools; a unit runs on one of them.
        decoder: the model.
        formats: its storage.
        traits: of the engine.
        release: of the engine; empty: the newest.
        demand: the traffic.
        loads: of the experts, as recorded; None: those of the kernel tables.
        page_by_pool: tokens of a page, where it is not the engine's own.
        refuse: called with every unit that serves.
    """
    launched: list[Option] = []
    refused: list[Option] = []
    illegal: Counter[str] = Counter()
    for serving_pool in serving_pools:
        for attention_degrees, ffn_degrees in sides_of(serving_pool.pool, decoder):
            ffn = Iteration(
                decoder=decoder,
                formats=formats,
                degrees=ffn_degrees,
                traits=traits,
                machine=serving_pool.machine,
                a2a_backend=A2aBackend.ALLGATHER,
                stream_s=traits.rank_stream_s(attention_degrees.attention_data),
                release=release,
                loads=_borne(loads, decoder, ranks=ffn_degrees.expert),
            )
            if not _has_room(
                ffn, serving_pool, peers=attention_degrees.devices / ffn_degrees.devices, running=1
            ):
                illegal[NO_FFN_ROOM] += 1
                continue
            for halves in (False, True)[: 1 + (attention_degrees.attention_data > 1)]:
                unit = remote_ffn_step(ffn, attention_degrees, serving_pool, halves=halves)
                made, reason = decode_options(
                    serving_pool,
                    unit,
                    budget=BUDGET,
                    demand=demand,
                    page_tokens=page_by_pool.get(serving_pool.pool.name),
                )
                illegal.update([reason] if reason else [])
                for option in made:
                    if not _has_room(ffn, serving_pool, peers=unit.peers, running=option.running):
                        illegal[NO_FFN_ROOM] += 1
                    elif refusal := refuse(option):
                        illegal[refusal] += 1
                        refused.append(option)
                    else:
                        launched.append(option)
    return Options(
        options=drop_dominated(launched),
        refused_units=drop_dominated(refused),
        illegal_by=dict(illegal.most_common()),
    )


def sides_of(pool: Pool, decoder: Decoder) -> Iterator[tuple[InstanceDegrees, InstanceDegrees]]:
    """Yield the degrees of attention and FFN servers that a pool has devices for."""
    experts = decoder.experts
    if experts is None:
        return
    largest_side = min(LARGEST_SIDE, pool.num_devices)
    whole = [ranks for ranks in range(1, largest_side + 1) if experts.num % ranks == 0]
    for ffn in whole:
        several = {ffn * peers for peers in PEERS}
        fewer = {ffn // share for share in FEWER if ffn % share == 0}
        for attention in sorted(several | fewer):
            if attention <= LARGEST_SIDE and attention + ffn <= pool.num_devices:
                yield (
                    InstanceDegrees(attention_data=attention),
                    InstanceDegrees(attention_data=ffn, expert=ffn),
                )
    for tensor in (2, 4, 8):
        for ranks in whole:
            is_split = ranks % tensor == 0 and decoder.is_split_by(tensor) and tensor <= pool.domain
            if is_split and 2 * ranks <= pool.num_devices:
                attention_degrees = InstanceDegrees(
                    attention_tensor=tensor, attention_data=ranks // tensor
                )
                yield (
                    attention_degrees,
                    InstanceDegrees(
                        attention_tensor=tensor, attention_data=ranks // tensor, expert=ranks
                    ),
                )


def remote_ffn_step(
    ffn: Iteration, attention_degrees: InstanceDegrees, serving_pool: ServingPool, *, halves: bool
) -> RemoteFfnIteration:
    """Return the steps of attention servers with such an FFN server, both on one pool.

    Args:
        ffn: the server of the networks.
        attention_degrees: of the attention server.
        serving_pool: where both run.
        halves: batches run as two halves.
    """
    pool, sheet = serving_pool.pool, serving_pool.machine.sheet
    link = peer_link(
        inside_bytes_per_s=sheet.scale_up_bytes_per_s,
        nic_bytes_per_s=sheet.scale_out_bytes_per_s,
        is_inside=attention_degrees.devices + ffn.degrees.devices <= pool.domain,
    )
    return RemoteFfnIteration(
        decoder=attention_only(ffn.decoder),
        formats=ffn.formats,
        degrees=attention_degrees,
        traits=ffn.traits,
        machine=serving_pool.machine,
        two_batch_overlap=halves,
        stream_s=ffn.stream_s,
        release=ffn.release,
        ffn=ffn,
        link=link,
    )


def _has_room(ffn: Iteration, serving_pool: ServingPool, *, peers: float, running: int) -> bool:
    several = max(peers, 1.0)
    return ffn_fits(
        ffn,
        memory_bytes=serving_pool.memory_bytes,
        step_tokens=round(several * BUDGET.tokens),
        running=round(several * running),
    )


def _borne(loads: ExpertLoads | None, decoder: Decoder, *, ranks: int) -> ExpertLoads | None:
    """Return the loads of an FFN server's ranks; it has no redundant experts."""
    experts = decoder.experts
    if experts is None:
        return None
    return ExpertCopies(loads=loads).borne(experts, ranks=ranks, nodes=1, redundant=0)


def _variants(problem: ServeProblem) -> tuple[ServeProblem, ...]:
    """Take refused AFD units where there are no others, so that the plan names the refusal."""
    priced = problem.own_options[NAME]
    units = priced.options or priced.refused_units
    prefills = tuple(option for option in problem.options.options if option.role is Role.PREFILL)
    options = replace(problem.options, options=(*prefills, *units))
    return (replace(problem, options=options),) if units else ()


def _explain(problem: ServeProblem) -> str:
    """Say why no AFD unit serves, whether a release launches it or not; empty: some do."""
    units = problem.own_options[NAME]
    if problem.decoder.experts is None:
        return "the model has no experts"
    if units.options or units.refused_units:
        return ""
    return next(iter(units.illegal_by), "no pool has devices for both sides of an AFD unit")


def _cautions(solution: ModeSolution) -> Iterator[str]:
    yield (
        "AFD (attention-FFN disaggregation) is an experiment of the engine's plugin: messages that"
        " announce each step, and steps beyond the captured graphs, are not priced, and no run was"
        " compared; measure before relying on it"
    )
    if any(
        isinstance(option.iteration, RemoteFfnIteration)
        and option.devices > option.serving_pool.pool.devices_per_node
        for option in (group.option for group in solution.groups)
    ):
        yield (
            "AFD units span machines, which the plugin has verified for DeepSeek-V2-Lite with 2"
            " attention and 2 FFN devices only"
        )


MODE = ServingMode(
    priced_roles=(Role.PREFILL,),
    price=_price,
    option_noun="AFD units",
    variants=_variants,
    simulate=simulate_slowest,
    explain=_explain,
    cautions=_cautions,
)
