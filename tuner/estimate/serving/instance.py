"""What one kind of instance does under the spec's traffic.

    d ranks of attention    n sequences of a rank    I, O computed tokens of a prompt, an answer's
    P seconds of a prompt   T(n), U(n) per token, alone and beside prompts

    capacity    prefill d / P    decode d n / (O T(n))    both d n / (O U(n))

as in tuner/planner/serve/options.py and mixing.py;
n is what the launch allows, held to what memory has room for. The traffic is played by
tuner/planner/serve/simulation.py. A prefill instance is played before decode instances of
the same split that never make it wait, and the other way round; of a closed loop, whose rate then
depends on the other half, the rate that its targets ask for is played instead.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tuner.costs.serving.cache_capacity import Room, automatic_ratio, room_of
from tuner.costs.serving.capacity import held_kv_bytes_per_token, held_weight_bytes
from tuner.costs.serving.curves import Floats
from tuner.costs.serving.decoder import AttentionKind, Decoder, Formats, decoder_of
from tuner.costs.serving.engine import Degrees, Engine, Exchange
from tuner.costs.serving.expert_loads import ExpertLoads
from tuner.costs.serving.iteration import Iteration
from tuner.costs.serving.memory_rules import rule_of
from tuner.costs.serving.remote_ffn import RemoteFfnIteration, ffn_fits
from tuner.costs.serving.reserve import Reserve, reserve_of
from tuner.costs.serving.speculative import Drafting, Method
from tuner.errors import SpecError
from tuner.estimate.serving.launch import ServingLaunch, Setting
from tuner.estimate.serving.records import ServingLoad, ServingMemory
from tuner.planner.serve.afd_options import remote_ffn_step
from tuner.planner.serve.demand import MOST_RUNNING, Demand, demand_of
from tuner.planner.serve.expert_copies import ExpertCopies
from tuner.planner.serve.instances import formats_of_goal
from tuner.planner.serve.kv_transfers import handovers_of
from tuner.planner.serve.launchable import copies_of
from tuner.planner.serve.mixed_batches import prompt_time, token_seconds
from tuner.planner.serve.options import (
    Option,
    PoolSite,
    most_running,
    step_seconds,
)
from tuner.planner.serve.recorded_loads import expert_loads
from tuner.planner.serve.simulation import Group, Played, latency_of, played_apart, played_together
from tuner.serve_plan import Instances, Role
from tuner.spec.serving.goal import Engine as NamedEngine
from tuner.spec.serving.goal import Percentiles, ServeGoal
from tuner.spec.serving.manifests.registry import release_on
from tuner.spec.serving.manifests.rules import nodes_of
from tuner.spec.serving.read import ServeSpec
from tuner.units import format_bytes

SGLANG_CAPTURED: Final = (256, 512)
"""Sequences of the largest graph of fewer than four devices, and of more (SGLang 0.5.23,
`arg_groups/memory_hook.py`, devices of 60 GiB and more)."""
SGLANG_MANY: Final = 4
COUNTS: Final = 16
"""Numbers of sequences that are priced, where prompts may keep all from running at once."""
IDLE_FACTOR = 4.0
"""Capacity of the other half of a prefill or decode instance, over what is asked."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """Everything that a setting is priced from."""

    launch: ServingLaunch
    spec: ServeSpec
    """With the launch's engine, formats and lengths."""
    site: PoolSite
    demand: Demand
    decoder: Decoder
    formats: Formats
    instances: int
    """That share the traffic."""
    copies: ExpertCopies = field(default_factory=ExpertCopies)
    """Recorded loads of experts, and what copies make of them."""
    release: str = ""
    """Whose memory rule counts; empty: the newest."""

    def drafting(self, setting: Setting) -> Drafting | None:
        """Return how a setting drafts; None too where nothing says how many drafts are kept."""
        own = self.spec.goal.speculative
        if not setting.draft_tokens or own is None:
            return None
        return Drafting(
            draft_tokens=setting.draft_tokens,
            acceptance=own.acceptance,
            method=self.draft_method,
        )

    @property
    def draft_method(self) -> Method:
        """What drafts in the launch; where nothing does, what the spec allows."""
        own = self.spec.goal.speculative
        if self.launch.setting.draft_tokens or own is None:
            return self.launch.draft_method
        return Method(own.method)

    @property
    def goal(self) -> ServeGoal:
        """Of the spec."""
        return self.spec.goal

    @property
    def longest_tokens(self) -> int:
        """Of the longest request that is planned for."""
        return self.demand.longest_input + self.demand.longest_output


def asked_of(
    launch: ServingLaunch,
    *,
    spec: ServeSpec,
    site: PoolSite,
    instances: int = 1,
    release: str = "",
) -> Asked:
    """Join a launch and a spec's goal; where they differ the launch counts.

    Raises:
        SpecError: the traffic cannot be read, or the launch answers no requests.
    """
    if launch.role is Role.EXPERT:
        raise SpecError(
            f"{launch.source}: an FFN server answers no requests; estimate the launch of its"
            " attention server, which is priced with it"
        )
    if launch.role is Role.ATTENTION:
        launch = replace(launch, role=Role.DECODE)
    model = spec.model
    goal = spec.goal.model_copy(
        update={
            "engine": _engine(launch, spec.goal.engine_on(site.pool.name)),
            "engines": {},
            "quantization": _quantization(launch, spec.goal),
            "kv_cache_dtype": launch.kv_cache_dtype,
            "max_model_len": launch.max_model_len,
            "slo": spec.goal.slo.model_copy(update=_other_half(launch.role)),
            "traffic": spec.goal.traffic
            if launch.has_prefix_cache
            else spec.goal.traffic.model_copy(update={"prefix_hit": 0.0}),
        }
    )
    longest = min(goal.max_model_len or model.max_position, model.max_position)
    demand = demand_of(goal, longest=longest)
    if launch.role is not Role.AGGREGATED and demand.concurrency is not None:
        traffic = goal.traffic.model_copy(update={"concurrency": None, "rate": demand.rate_per_s})
        goal = goal.model_copy(update={"traffic": traffic})
        demand = replace(demand, concurrency=None)
    return Asked(
        launch=launch,
        spec=replace(spec, goal=goal),
        site=site,
        demand=demand,
        decoder=decoder_of(model),
        formats=formats_of_goal(goal),
        instances=instances * launch.copies,
        copies=copies_of(model, release_on(goal, site.pool), expert_loads(goal, model)),
        release=release,
    )


def _quantization(launch: ServingLaunch, goal: ServeGoal) -> str:
    """Return the format of the weights; both kinds of fp8 checkpoints are loaded as `fp8`."""
    if launch.quantization == "fp8" and goal.quantization == "fp8_block":
        return goal.quantization
    return launch.quantization or goal.quantization


def _engine(launch: ServingLaunch, own: NamedEngine) -> NamedEngine:
    is_same = own.name == launch.engine.value
    return own if is_same else NamedEngine.model_validate({"name": launch.engine.value})


def _other_half(role: Role) -> dict[str, Percentiles]:
    """Targets that an instance of this role has no part in."""
    unlimited = {Role.PREFILL: "tpot", Role.DECODE: "ttft"}.get(role)
    return {} if unlimited is None else {unlimited: Percentiles()}


def option_of(asked: Asked, setting: Setting) -> Option:
    """Price one instance."""
    site, demand, role = asked.site, asked.demand, asked.launch.role
    iteration = _iteration(asked, setting)
    running = min(setting.running, MOST_RUNNING)
    room = _room(asked, iteration, setting)
    cache = _tokens(asked, iteration, room, request_tokens=demand.held_tokens)
    data = setting.degrees.attention_data
    prompt = prompt_time(iteration, demand, step_tokens=setting.step_tokens)
    held_N = np.array([float(min(running, most_running(cache, demand, engine=iteration.engine)))])
    if role is Role.PREFILL:
        rate, ttft_s, tpot_s = data / prompt.busy_s, prompt.latency_s, 0.0
    else:
        ttft_s = 0.0 if role is Role.DECODE else prompt.latency_s
        tpot_s = float(_token_seconds(asked, iteration, setting, held_N)[0])
        rate = data * float(held_N[0]) / (demand.output_tokens * tpot_s)
    return Option(
        site=site,
        role=role,
        degrees=setting.degrees,
        iteration=iteration,
        running=running,
        rate_per_s=rate,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        kv_tokens=cache,
        step_tokens=setting.step_tokens,
        is_chunked=setting.is_chunked,
        page_tokens=setting.page_tokens,
    )


def _iteration(asked: Asked, setting: Setting) -> Iteration:
    """Return the steps of an instance, of an attention server with those of its FFN server."""
    own = Iteration(
        decoder=asked.decoder,
        formats=asked.formats,
        degrees=setting.degrees,
        engine=asked.launch.engine,
        machine=asked.site.machine,
        drafting=asked.drafting(setting),
        two_batch_overlap=setting.two_batch_overlap,
        loads=_loads(asked, setting),
        exchange=_exchange(asked, setting),
        redundant_experts=setting.redundant_experts,
    )
    ranks = asked.launch.ffn_devices
    if not ranks:
        return own
    # Tensor ranks of an FFN server get the same tokens, so its tensor degree is attention's.
    tensor = setting.degrees.attention_tensor if ranks == setting.degrees.devices else 1
    degrees = Degrees(attention_tensor=tensor, attention_data=ranks // tensor, expert=ranks)
    loads = _loads(asked, replace(setting, degrees=degrees))
    ffn = replace(own, degrees=degrees, loads=loads, drafting=None, two_batch_overlap=False)
    return remote_ffn_step(ffn, setting.degrees, asked.site, halves=setting.two_batch_overlap)


def _loads(asked: Asked, setting: Setting) -> ExpertLoads | None:
    """Return what the ranks bear with the setting's copies of experts."""
    own, degrees = asked.decoder.experts, setting.degrees
    if own is None:
        return None
    nodes = nodes_of(
        degrees.expert * degrees.moe_tensor, devices_per_node=asked.site.pool.devices_per_node
    )
    return asked.copies.borne(
        own, ranks=degrees.expert, nodes=nodes, redundant=setting.redundant_experts
    )


def _exchange(asked: Asked, setting: Setting) -> Exchange:
    """Return how data ranks exchange tokens: as the launch says, else by gathering all."""
    own = setting.a2a_backend
    if setting.degrees.attention_data == 1 or own == "none":
        return Exchange.ALLGATHER
    return Exchange(own)


def _token_seconds(
    asked: Asked, iteration: Iteration, setting: Setting, running_N: Floats
) -> Floats:
    """Seconds per token; where more run than the budget leaves steps for, as prompts allow."""
    demand = asked.demand
    if asked.launch.role is Role.DECODE:
        return np.asarray(step_seconds(iteration, running_N, demand) / iteration.tokens_per_step)
    count_N = np.unique(np.floor(np.geomspace(1.0, running_N[0], COUNTS)))
    tpot_s_N = token_seconds(iteration, count_N, demand, step_tokens=setting.step_tokens)
    # Where so many never run at once, those that do serve at the rate that prompts are read at.
    last = np.flatnonzero(np.isfinite(tpot_s_N))[-1]
    return np.asarray(tpot_s_N[last] * running_N / count_N[last])


def reserve_of_launch(asked: Asked, iteration: Iteration, setting: Setting) -> Reserve:
    """What the largest steps of a launch take; prompts alone run without graphs."""
    captured = 0 if asked.launch.role is Role.PREFILL else setting.graph_sequences
    return reserve_of(
        iteration,
        step_tokens=setting.step_tokens,
        running=min(setting.running, MOST_RUNNING),
        captured=captured,
        rule=rule_of(iteration.engine, asked.release),
    )


def _room(asked: Asked, iteration: Iteration, setting: Setting) -> Room:
    """What the engine makes of a device's memory as the launch tells it to."""
    ratio = asked.launch.memory_ratio
    if ratio is None and iteration.engine is Engine.SGLANG:
        ratio = _sglang_ratio(asked, iteration, setting)
    return room_of(
        rule_of(iteration.engine, asked.release),
        weights=held_weight_bytes(iteration),
        reserve=reserve_of_launch(asked, iteration, setting),
        memory_bytes=asked.site.memory_bytes,
        ratio=ratio,
        cache_bytes=asked.launch.cache_bytes,
    )


def _sglang_ratio(asked: Asked, iteration: Iteration, setting: Setting) -> float:
    role, degrees = asked.launch.role, iteration.degrees
    sequences = setting.running * degrees.attention_data
    usual = SGLANG_CAPTURED[degrees.devices >= SGLANG_MANY]
    captured = usual if setting.graph_sequences is None else setting.graph_sequences
    kinds = {group.attention.kind for group in asked.decoder.layers}
    return automatic_ratio(
        degrees,
        memory_bytes=asked.site.memory_bytes,
        active_tokens=sequences * iteration.checked_tokens
        if role is Role.DECODE
        else setting.step_tokens * degrees.attention_data,
        captured=0 if role is Role.PREFILL else min(captured, sequences),
        has_prompts=role is not Role.DECODE,
        has_latent_cache=bool(kinds & {AttentionKind.LATENT, AttentionKind.SPARSE_LATENT}),
        has_deepep=setting.a2a_backend.startswith("deepep"),
    )


def _tokens(asked: Asked, iteration: Iteration, room: Room, *, request_tokens: float) -> float:
    """Tokens of a rank's cache, as requests of that length fill it."""
    each = held_kv_bytes_per_token(iteration, request_tokens=request_tokens)
    most = asked.launch.most_cached_tokens
    held = room.cache_bytes / max(each, 1e-9)
    return held if most is None else min(held, float(most))


def misfit_of(asked: Asked, option: Option, setting: Setting) -> str:
    """Why a launch does not run, in a line; empty where it does."""
    room = _room(asked, option.iteration, setting)
    if room.cache_bytes <= 0.0:
        return "the share of memory that the engine takes leaves no cache beside the weights"
    if room.lacking_bytes > 0.0:
        return (
            f"weights and cache leave {format_bytes(int(room.lacking_bytes))} too little for"
            " activations, CUDA graphs and buffers; give the engine a smaller "
            f"{'share of memory' if asked.launch.cache_bytes is None else 'cache'}, or its steps"
            " fewer tokens"
        )
    own = option.iteration
    if isinstance(own, RemoteFfnIteration):
        peers = max(own.peers, 1.0)
        tokens, running = round(peers * setting.step_tokens), round(peers * option.running)
        memory = asked.site.memory_bytes
        if not ffn_fits(own.ffn, memory_bytes=memory, step_tokens=tokens, running=running):
            return (
                f"a device of its FFN server has no room for the experts beside steps of {tokens}"
                " tokens; give it more devices, or its attention server fewer tokens a step"
            )
    longest = asked.longest_tokens
    if option.kv_tokens < longest:
        return f"a rank's cache has no room for a request of {longest} tokens"
    whole = asked.demand.most_tokens
    held = _tokens(asked, option.iteration, room, request_tokens=float(whole))
    rule = rule_of(option.iteration.engine, asked.release)
    if rule.wants_whole_length and held < whole:
        return (
            f"the engine wants room for one request of {whole} tokens, a rank's cache holds"
            f" {int(held)}; state a smaller --max-model-len"
        )
    return ""


def logged_tokens(asked: Asked, option: Option, setting: Setting) -> int:
    """Tokens of a rank's cache as the engine's log counts them: for the longest request."""
    room = _room(asked, option.iteration, setting)
    longest = float(asked.demand.most_tokens)
    return int(max(_tokens(asked, option.iteration, room, request_tokens=longest), 0.0))


def instances_needed(asked: Asked, option: Option) -> int:
    """How many instances serve the traffic's rate; of a closed loop, those that there are."""
    if asked.demand.concurrency is not None:
        return asked.instances
    return max(1, math.ceil(asked.demand.rate_per_s / option.rate_per_s))


def load_of(asked: Asked, option: Option) -> ServingLoad:
    """Play the traffic against the launch's instances."""
    group = Group(option=option, count=asked.instances)
    played = _played(asked, group)
    served = played.requests_per_s
    if asked.demand.concurrency is None:
        served = min(served, group.rate_per_s)
    share = served / max(played.requests_per_s, 1e-9)
    devices = group.count * option.devices
    missed = played.missed(asked.goal.slo)
    return ServingLoad(
        devices=devices,
        ttft_s=None if option.role is Role.DECODE else latency_of(played.ttft_s_R),
        tpot_s=None if option.role is Role.PREFILL else latency_of(played.tpot_s_R),
        requests_per_s=served,
        output_tokens_per_s=0.0
        if option.role is Role.PREFILL
        else played.output_tokens_per_s * share,
        goodput_per_device=served * played.met_ratio / devices,
        capacity_per_s=group.rate_per_s,
        keeps_up=instances_needed(asked, option) <= asked.instances,
        missed=missed,
    )


def _played(asked: Asked, group: Group) -> Played:
    goal, demand, option = asked.goal, asked.demand, group.option
    if option.role is Role.AGGREGATED:
        return played_together((group,), goal=goal, demand=demand)
    other = Role.DECODE if option.role is Role.PREFILL else Role.PREFILL
    half = option_of(
        replace(asked, launch=replace(asked.launch, role=other, ffn_devices=0)),
        replace(asked.launch.setting, degrees=option.degrees, running=MOST_RUNNING),
    )
    many = max(1, math.ceil(IDLE_FACTOR * demand.rate_per_s / half.rate_per_s))
    # The other half is no part of the launch: its memory never makes requests wait either.
    idle = Group(option=replace(half, kv_tokens=math.inf), count=many)
    pair = (group, idle) if option.role is Role.PREFILL else (idle, group)
    moving = handovers_of(asked.spec, input_tokens=demand.input_tokens, options=(option,))
    return played_apart(*pair, hand_overs=moving, goal=goal, demand=demand)


def memory_of_device(asked: Asked, option: Option, setting: Setting) -> ServingMemory:
    """Return what one device holds."""
    iteration, demand = option.iteration, asked.demand
    each = held_kv_bytes_per_token(iteration, request_tokens=demand.held_tokens)
    return ServingMemory(
        weight_bytes=int(held_weight_bytes(iteration)),
        cache_bytes=int(max(option.kv_tokens, 0.0) * each),
        reserve_bytes=int(reserve_of_launch(asked, iteration, setting).total),
        device_bytes=int(asked.site.memory_bytes),
        limit_ratio=max(_room(asked, iteration, setting).ratio, 0.0),
    )


def instance_of(asked: Asked, option: Option, setting: Setting) -> Instances:
    """Return the launch's instances in the words of a plan."""
    degrees, backend = option.degrees, setting.a2a_backend
    is_cell = isinstance(option.iteration, RemoteFfnIteration)
    has_experts = asked.decoder.experts is not None and not is_cell
    is_apart = degrees.attention_data > 1
    if not is_apart and backend == "allgather":
        backend = "none"
    return Instances.model_validate(
        {
            "role": Role.ATTENTION if is_cell else option.role,
            "pool": asked.site.pool.name,
            "count": asked.instances,
            "devices": degrees.devices,
            "attention_tp": degrees.attention_tensor,
            "attention_dp": degrees.attention_data,
            "moe_tp": degrees.moe_tensor if has_experts else 1,
            "ep": degrees.expert if has_experts else 1,
            "pp": degrees.pipeline,
            "max_batch": option.running,
            "max_batched_tokens": option.step_tokens,
            "chunked_prefill": option.is_chunked,
            "page_size": option.page_tokens,
            "draft_tokens": setting.draft_tokens,
            "two_batch_overlap": setting.two_batch_overlap,
            "redundant_experts": setting.redundant_experts,
            "a2a_backend": "allgather" if is_apart and backend == "none" else backend,
            "kv_tokens": int(max(option.kv_tokens, 0.0) * degrees.attention_data),
            "memory_ratio": asked.launch.memory_ratio,
        }
    )
