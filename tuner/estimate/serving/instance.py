"""Prices one kind of instance and simulates the spec's traffic on it.

    d attention-data ranks    n sequences of a rank    I, O computed input, output tokens
    P seconds of a prompt     T(n), U(n) seconds per token, of decode and of mixed steps

    capacity    prefill d / P    decode d n / (O T(n))    both d n / (O U(n))

as in tuner/search/serve/options.py and mixed_batches.py;
n is what the launch allows, limited by memory. tuner/search/serve/simulation.py simulates the
traffic. A prefill instance is simulated with decode instances of the same degrees that are never
the bottleneck, and the other way round: they take several times what comes, in a closed loop of C
requests several times what the launch can. There X = C / (TTFT + O TPOT), the other half included.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tuner.catalog.serve_rules.rules import nodes_needed
from tuner.catalog.serve_rules.traits import MemoryFractionKind
from tuner.config.serve import Instances, Role
from tuner.costs.serve.cache_capacity import Room, room_of
from tuner.costs.serve.capacity import (
    admission_bytes,
    filled_ratio,
    instance_block_pool,
    instance_kv_bytes_per_token,
    instance_state_bytes,
    instance_weight_bytes,
)
from tuner.costs.serve.decoder import Decoder, Formats, decoder_of
from tuner.costs.serve.engine import A2aBackend, InstanceDegrees
from tuner.costs.serve.expert_loads import ExpertLoads
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.remote_ffn import RemoteFfnIteration, ffn_fits
from tuner.costs.serve.reserve import Reserve, step_reserve
from tuner.costs.serve.speculative import Drafting, DraftMethod
from tuner.engines.reading.serve_launch import InstanceKnobs, ServingLaunch
from tuner.engines.reading.weight_methods import check_bits
from tuner.engines.registry import engine_file
from tuner.engines.serving.releases import ENGINE_TRAITS, release_on
from tuner.errors import SpecError
from tuner.estimate.serving.records import ServingLoad, ServingMemory
from tuner.search.serve.demand import (
    MOST_RUNNING,
    Demand,
    PrefixHits,
    build_demand,
    spread_hits,
)
from tuner.search.serve.expert_copies import ExpertCopies
from tuner.search.serve.instances import goal_formats
from tuner.search.serve.kv_transfers import KvTransfers, build_kv_transfers
from tuner.search.serve.launchable import (
    beside_polling_thread,
    copies_of,
    has_polling_thread,
)
from tuner.search.serve.mixed_batches import lasting_running, prompt_time, token_seconds
from tuner.search.serve.modes.aggregated import simulate_aggregated_mode
from tuner.search.serve.modes.attention_expert import remote_ffn_step
from tuner.search.serve.modes.disaggregated import simulate_disaggregated_mode
from tuner.search.serve.options import (
    Option,
    ServingPool,
    most_running,
    step_seconds,
)
from tuner.search.serve.recorded_loads import expert_loads
from tuner.search.serve.routers import has_sessions
from tuner.search.serve.simulation import (
    MOST_REQUESTS,
    InstanceGroup,
    SimulationResult,
    corrected_result,
    latency_of,
)
from tuner.spec.serving.goal import Engine, Percentiles, ServeGoal
from tuner.spec.serving.spec import ServeSpec
from tuner.units import format_bytes

MOST_SHARE_HUNDREDTHS = 95
"""Largest share of memory that is tried, in hundredths, as recipes of the engines state it at
most."""
ROLE_REQUESTS = 4000
"""Requests that are simulated on a prefill or decode launch, or two rounds of a closed loop."""
IDLE_FACTOR = 4.0
"""Capacity of the other half of a prefill or decode instance, over the rate of an open load or the
launch's capacity."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EstimateInputs:
    """Everything that pricing a setting needs."""

    launch: ServingLaunch
    spec: ServeSpec
    """The spec with the launch's engine, formats and lengths."""
    serving_pool: ServingPool
    demand: Demand
    decoder: Decoder
    formats: Formats
    instances: int
    """Number of instances that share the traffic."""
    copies: ExpertCopies = field(default_factory=ExpertCopies)
    """Recorded expert loads, and their balance with redundant experts."""
    release: str = ""
    """Engine release whose memory rule applies; empty: the newest."""
    beside: InstanceGroup | None = None
    """Instances of the other role that a prefill or decode launch is simulated with."""
    is_beside_stated: bool = False
    """The file states the instances of `beside`; else they are taken to be of the launch's
    degrees."""

    def drafting(self, setting: InstanceKnobs) -> Drafting | None:
        """Return how a setting drafts; None without drafts or without a stated acceptance."""
        speculative = self.spec.goal.speculative
        if not setting.draft_tokens or speculative is None:
            return None
        return Drafting(
            draft_tokens=setting.draft_tokens,
            acceptance=speculative.acceptance,
            method=self.draft_method,
        )

    @property
    def draft_method(self) -> DraftMethod:
        """The launch's draft method; without drafts, the spec's."""
        speculative = self.spec.goal.speculative
        if self.launch.setting.draft_tokens or speculative is None:
            return self.launch.draft_method
        return DraftMethod(speculative.method)

    @property
    def goal(self) -> ServeGoal:
        """Goal of the spec."""
        return self.spec.goal

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest request that is planned for."""
        return self.demand.longest_input + self.demand.longest_output


def build_inputs(
    launch: ServingLaunch,
    *,
    spec: ServeSpec,
    serving_pool: ServingPool,
    instances: int = 1,
    release: str = "",
) -> EstimateInputs:
    """Join a launch and a spec's goal; where they differ the launch counts.

    Raises:
        SpecError: the traffic cannot be read, or the launch serves no requests.
    """
    if launch.role is Role.EXPERT:
        raise SpecError(
            f"{launch.source}: an FFN server serves no requests; estimate the launch of its"
            " attention server, which is priced with it"
        )
    if launch.role is Role.ATTENTION:
        launch = replace(launch, role=Role.DECODE)
    model = spec.model
    goal = spec.goal.model_copy(
        update={
            "engine": _engine(launch, spec.goal.engine_on(serving_pool.pool.name)),
            "engines": {},
            "quantization": _quantization(launch, spec.goal),
            "kv_cache_dtype": launch.kv_cache_dtype,
            "max_model_len": launch.max_model_len,
            "slo": spec.goal.slo.model_copy(update=_other_half(launch.role)),
            "traffic": spec.goal.traffic
            if launch.reader.has_prefix_cache or launch.reader.role is Role.DECODE
            else spec.goal.traffic.model_copy(update={"prefix_hit": 0.0}),
        }
    )
    engine = release_on(goal, serving_pool.pool)
    if has_polling_thread(engine, launch.role):
        serving_pool = beside_polling_thread(serving_pool)
    longest = min(goal.max_model_len or model.max_position, model.max_position)
    return EstimateInputs(
        launch=launch,
        spec=replace(spec, goal=goal, releases={**spec.releases, serving_pool.pool.name: engine}),
        serving_pool=serving_pool,
        demand=_demand(goal, launch, longest=longest, instances=instances),
        decoder=replace(decoder_of(model), vision_elements=0)
        if launch.is_text_only
        else decoder_of(model),
        formats=goal_formats(goal, spec.model),
        instances=instances * launch.copies,
        copies=copies_of(model, engine, expert_loads(goal, model)),
        release=release,
    )


def with_launch(inputs: EstimateInputs, launch: ServingLaunch) -> EstimateInputs:
    """Return the inputs of a launch that differs in settings, memory, cache type or lengths."""
    formats = {
        "kv_cache_dtype": launch.kv_cache_dtype,
        "max_model_len": launch.max_model_len,
    }
    if all(getattr(inputs.goal, name) == value for name, value in formats.items()):
        return replace(inputs, launch=launch)
    return with_goal(replace(inputs, launch=launch), formats)


def with_goal(inputs: EstimateInputs, update: Mapping[str, object]) -> EstimateInputs:
    """Return the inputs with other keys of the goal."""
    spec, model, launch = inputs.spec, inputs.spec.model, inputs.launch
    goal = spec.goal.model_copy(update=update)
    longest = min(goal.max_model_len or model.max_position, model.max_position)
    return replace(
        inputs,
        spec=replace(spec, goal=goal),
        demand=_demand(goal, launch, longest=longest, instances=inputs.instances // launch.copies),
        formats=goal_formats(goal, model),
    )


def _demand(goal: ServeGoal, launch: ServingLaunch, *, longest: int, instances: int) -> Demand:
    """Read the traffic, with the hits that a session finds on the launch's own caches."""
    demand = build_demand(goal, longest=longest)
    if not has_sessions(goal):
        return demand
    reader = launch.reader
    readers = instances if reader is launch else reader.replicas
    places = 1 if reader.follows_prefixes else readers

    def left(_role: Role, ranks: int) -> PrefixHits | None:
        caches = places * (1 if reader.finds_ranks else reader.copies * ranks)
        return spread_hits(goal.traffic.prefix_hit, places=caches)

    return replace(demand, hits_by_ranks=left)


def _quantization(launch: ServingLaunch, goal: ServeGoal) -> str:
    """Return the weight format; all kinds of fp8 checkpoints are loaded as `fp8`."""
    if launch.quantization == "fp8" and goal.quantization.startswith("fp8_block"):
        return goal.quantization
    if not launch.quantization:
        check_bits(launch.source, launch.weight_bits, quantization=goal.quantization)
    return launch.quantization or goal.quantization


def _engine(launch: ServingLaunch, spec_engine: Engine) -> Engine:
    is_same = spec_engine.name == launch.engine
    return spec_engine if is_same else Engine.model_validate({"name": launch.engine})


def _other_half(role: Role) -> dict[str, Percentiles]:
    """SLO targets that an instance of this role cannot affect."""
    unlimited = {Role.PREFILL: "tpot", Role.DECODE: "ttft"}.get(role)
    return {} if unlimited is None else {unlimited: Percentiles()}


def price_option(inputs: EstimateInputs, setting: InstanceKnobs) -> Option:
    """Price one instance."""
    serving_pool, role = inputs.serving_pool, inputs.launch.role
    data = setting.degrees.attention_data
    demand = inputs.demand.on(role, ranks=data)
    iteration = _iteration(inputs, setting)
    loaded = _loaded(inputs, iteration, setting)
    room = _room(inputs, loaded, setting)
    running = min(setting.running, MOST_RUNNING, _most_by_states(inputs, loaded, room))
    cache = _tokens(inputs, loaded, room, request_tokens=demand.held_tokens)
    prompt = prompt_time(iteration, demand, step_tokens=setting.step_tokens)
    batch = float(min(running, most_running(cache, demand, traits=iteration.traits)))
    batch_N = np.array([batch])
    rate, ttft_s, tpot_s = data / prompt.busy_s, prompt.latency_s, 0.0
    if role is Role.DECODE:
        ttft_s, each_s_N = 0.0, step_seconds(iteration, batch_N, demand)
        tpot_s = float(each_s_N[0]) / iteration.tokens_per_step
    if role is Role.AGGREGATED:
        budget = setting.step_tokens
        tpot_s = float(token_seconds(iteration, batch_N, demand, step_tokens=budget)[0])
        batch = min(batch, lasting_running(iteration, demand, step_tokens=budget))
    if role is not Role.PREFILL:
        rate = data * batch / (demand.output_tokens * tpot_s)
    return Option(
        serving_pool=serving_pool,
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


def _iteration(inputs: EstimateInputs, setting: InstanceKnobs) -> Iteration:
    """Return the step model of an instance; of an attention server, with its FFN server's."""
    data = setting.degrees.attention_data
    iteration = Iteration(
        decoder=inputs.decoder,
        formats=inputs.formats,
        degrees=setting.degrees,
        traits=ENGINE_TRAITS[inputs.launch.engine],
        machine=inputs.serving_pool.machine,
        drafting=inputs.drafting(setting),
        two_batch_overlap=setting.two_batch_overlap,
        loads=_loads(inputs, setting),
        a2a_backend=_all_to_all_backend(setting),
        redundant_experts=setting.redundant_experts,
        is_eager=setting.graph_sequences == 0,
        graph_sequences=_graph_sequences(inputs, setting),
        stream_s=ENGINE_TRAITS[inputs.launch.engine].rank_stream_s(data) / setting.streamed_tokens,
        has_whole_graphs=setting.has_whole_graphs is True,
        exchanges_outputs=setting.exchanges_outputs,
        aligns_prompts=setting.aligns_prompts,
        release=inputs.release,
    )
    ranks = inputs.launch.ffn_devices
    if not ranks:
        return iteration
    # Tensor ranks of an FFN server get the same tokens, so its tensor degree is attention's.
    tensor = setting.degrees.attention_tensor if ranks == setting.degrees.devices else 1
    degrees = InstanceDegrees(attention_tensor=tensor, attention_data=ranks // tensor, expert=ranks)
    loads = _loads(inputs, replace(setting, degrees=degrees))
    ffn = replace(iteration, degrees=degrees, loads=loads, drafting=None, two_batch_overlap=False)
    return remote_ffn_step(
        ffn, setting.degrees, inputs.serving_pool, halves=setting.two_batch_overlap
    )


def _graph_sequences(inputs: EstimateInputs, setting: InstanceKnobs) -> float:
    """Return the sequences up to which a decode step has a graph, as stated or by memory."""
    sequences, engine = setting.graphed_sequences or setting.graph_sequences, inputs.launch.engine
    if sequences is None and ENGINE_TRAITS[engine].memory_rule(inputs.release).ratio is None:
        find, bytes_ = engine_file(engine, "read").usual_captured, inputs.serving_pool.memory_bytes
        sequences = find(bytes_, devices=setting.degrees.devices)
    return math.inf if sequences is None else sequences


def _loads(inputs: EstimateInputs, setting: InstanceKnobs) -> ExpertLoads | None:
    """Return the expert loads of the ranks with the setting's redundant experts."""
    experts, degrees = inputs.decoder.experts, setting.degrees
    if experts is None:
        return None
    nodes = nodes_needed(
        degrees.expert * degrees.moe_tensor,
        devices_per_node=inputs.serving_pool.pool.devices_per_node,
    )
    return inputs.copies.borne(
        experts, ranks=degrees.expert, nodes=nodes, redundant=setting.redundant_experts
    )


def _all_to_all_backend(setting: InstanceKnobs) -> A2aBackend:
    """Return the all-to-all backend: as the launch says, else all-gather."""
    backend = setting.a2a_backend
    if setting.degrees.attention_data == 1 or backend == "none":
        return A2aBackend.ALLGATHER
    return A2aBackend(backend)


def _loaded(inputs: EstimateInputs, iteration: Iteration, setting: InstanceKnobs) -> Iteration:
    """Return the instance with what it loads: drafts take memory whatever becomes of them."""
    if not setting.draft_tokens or iteration.drafting is not None:
        return iteration
    drafting = Drafting(
        draft_tokens=setting.draft_tokens, acceptance=0.0, method=inputs.draft_method
    )
    return replace(iteration, drafting=drafting)


def _launched(inputs: EstimateInputs) -> Iteration:
    setting = inputs.launch.setting
    return _loaded(inputs, _iteration(inputs, setting), setting)


def launch_reserve(inputs: EstimateInputs, iteration: Iteration, setting: InstanceKnobs) -> Reserve:
    """Memory reserve of a launch's largest steps; prefill-only steps run without graphs.

    An engine that profiles no step takes only what waits: whole prompts of the spec's traffic.
    """
    captured = 0 if inputs.launch.role is Role.PREFILL else setting.graph_sequences
    rule, demand = iteration.memory_rule, inputs.demand
    waiting = min(demand.concurrency or setting.running, setting.running) * demand.longest_input
    is_whole = rule.share is MemoryFractionKind.OF_FREE and not setting.is_chunked
    return step_reserve(
        iteration,
        step_tokens=min(setting.step_tokens, waiting) if is_whole else setting.step_tokens,
        running=min(setting.running, MOST_RUNNING),
        captured=captured,
        longest=inputs.demand.most_tokens,
        moves_cache=inputs.launch.role is not Role.AGGREGATED,
    )


def _room(inputs: EstimateInputs, iteration: Iteration, setting: InstanceKnobs) -> Room:
    """Return how the engine divides a device's memory under the launch's settings."""
    ratio, rule = inputs.launch.memory_ratio, iteration.memory_rule
    if ratio is None and rule.ratio is None:
        ratio = engine_file(iteration.traits.name, "read").own_memory_ratio(
            iteration,
            setting,
            role=inputs.launch.role,
            memory_bytes=inputs.serving_pool.memory_bytes,
            captures_prompts=iteration.captures_prompts,
        )
    return room_of(
        rule,
        weights=instance_weight_bytes(iteration),
        reserve=launch_reserve(inputs, iteration, setting),
        memory_bytes=inputs.serving_pool.memory_bytes,
        ratio=ratio,
        cache_bytes=inputs.launch.cache_bytes,
        filled_ratio=filled_ratio(iteration),
    )


def applied_share(inputs: EstimateInputs) -> float:
    """Return the share of memory that the launch gives the engine, or the engine itself."""
    setting = inputs.launch.setting
    return _room(inputs, _launched(inputs), setting).ratio


def largest_share(inputs: EstimateInputs) -> float | None:
    """Return the largest share of memory beside which the launch's steps fit, in hundredths."""
    setting, iteration = inputs.launch.setting, _launched(inputs)
    room = partial(
        room_of,
        iteration.memory_rule,
        weights=instance_weight_bytes(iteration),
        reserve=launch_reserve(inputs, iteration, setting),
        memory_bytes=inputs.serving_pool.memory_bytes,
    )
    shares = (hundredths / 100.0 for hundredths in range(MOST_SHARE_HUNDREDTHS, 0, -1))
    share = next((share for share in shares if room(ratio=share).lacking_bytes <= 0.0), None)
    return share if share is not None and room(ratio=share).cache_bytes > 0.0 else None


def largest_length(inputs: EstimateInputs) -> int:
    """Return the longest request that a rank's cache has room for, in whole kibitokens."""
    setting, iteration = inputs.launch.setting, _launched(inputs)
    room, demanded = _room(inputs, iteration, setting), float(inputs.demand.most_tokens)
    admitted = _longest_held(inputs, iteration, setting, room=room)
    cached = int(_tokens(inputs, iteration, room, request_tokens=demanded))
    return min(admitted, cached) // 1024 * 1024


def _longest_held(
    inputs: EstimateInputs, loaded: Iteration, setting: InstanceKnobs, *, room: Room
) -> int:
    """Return the tokens of the longest request, up to the engine's own, that the cache admits."""
    return bisect_right(
        range(1, inputs.demand.most_tokens + 1),
        room.cache_bytes,
        key=lambda tokens: _admission_bytes(loaded, setting, tokens=tokens),
    )


def _tokens(
    inputs: EstimateInputs, iteration: Iteration, room: Room, *, request_tokens: float
) -> float:
    """Tokens of a rank's KV cache for requests of that length."""
    token_bytes = instance_kv_bytes_per_token(iteration, request_tokens=request_tokens)
    max_tokens, pages = inputs.launch.most_cached_tokens, room.cache_bytes
    if inputs.launch.state_ratio is not None:
        token_bytes -= instance_state_bytes(iteration) / request_tokens
        pages /= 1.0 + inputs.launch.state_ratio
    cached = pages / max(token_bytes, 1e-9)
    return cached if max_tokens is None else min(cached, float(max_tokens))


def _most_by_states(inputs: EstimateInputs, iteration: Iteration, room: Room) -> int:
    """Return the sequences of a rank that have states, where the engine divides its memory."""
    ratio, state_bytes = inputs.launch.state_ratio, instance_state_bytes(iteration)
    if ratio is None or not state_bytes:
        return MOST_RUNNING
    return max(int(room.cache_bytes * ratio / (1.0 + ratio) / state_bytes), 1)


def misfit_reason(inputs: EstimateInputs, option: Option, setting: InstanceKnobs) -> str:
    """Say in one line why a launch does not fit; empty where it does."""
    loaded = _loaded(inputs, option.iteration, setting)
    room = _room(inputs, loaded, setting)
    share = f"the {_share_words(inputs)} share of memory, {room.ratio:.3g},"
    if inputs.launch.cache_bytes is not None:
        share = "the stated cache size"
    if room.cache_bytes <= 0.0:
        weights = format_bytes(int(instance_weight_bytes(loaded)))
        if room.left_bytes <= 0.0:
            return f"{weights} of weights a device leave no room for a KV cache, whatever the share"
        return f"{share} leaves no KV cache beside {weights} of weights a device"
    if room.lacking_bytes > 0.0:
        return (
            f"weights and cache leave {format_bytes(int(room.lacking_bytes))} too little for"
            " activations, CUDA graphs and buffers; give the engine a smaller "
            f"{'share of memory' if inputs.launch.cache_bytes is None else 'cache'}, or its steps"
            " fewer tokens"
        )
    iteration = option.iteration
    if isinstance(iteration, RemoteFfnIteration):
        peers = max(iteration.peers, 1.0)
        tokens, running = round(peers * setting.step_tokens), round(peers * option.running)
        memory = inputs.serving_pool.memory_bytes
        if not ffn_fits(iteration.ffn, memory_bytes=memory, step_tokens=tokens, running=running):
            return (
                f"a device of its FFN server has no room for the experts beside steps of {tokens}"
                " tokens; give it more devices, or its attention server fewer tokens a step"
            )
    budget, prompt = setting.step_tokens, inputs.demand.longest_input
    if not setting.is_chunked and option.role is not Role.DECODE and prompt > budget:
        return (
            f"prompts of {prompt} tokens are refused: without chunked prefill a step of {budget}"
            " tokens has to hold them whole"
        )
    longest, cache = inputs.longest_tokens, format_bytes(int(room.cache_bytes))
    if option.kv_tokens < longest:
        return (
            f"{share} leaves {cache} of cache a device: a rank's cache of"
            f" {int(option.kv_tokens)} tokens has no room for a request of {longest} tokens"
        )
    return _states_misfit(loaded, setting, room=room, share=share) or (
        _whole_length_misfit(inputs, loaded, setting, room=room, share=share)
    )


def _states_misfit(loaded: Iteration, setting: InstanceKnobs, *, room: Room, share: str) -> str:
    """Say why graphs of so many sequences lack blocks for states; empty where they do not."""
    rule = loaded.memory_rule
    pool = instance_block_pool(loaded)
    has_graphs = setting.graph_sequences != 0 and setting.has_whole_graphs is not False
    if pool is None or not rule.wants_state_blocks or not has_graphs:
        return ""
    blocks = int(room.cache_bytes / pool.block_bytes)
    if not any(group.states for group in pool.groups) or setting.running <= blocks:
        return ""
    return (
        f"{share} leaves {format_bytes(int(room.cache_bytes))} of cache a device: {blocks} blocks,"
        f" and each of {setting.running} sequences needs one for its state; allow at most"
        f" {blocks} sequences"
    )


def _whole_length_misfit(
    inputs: EstimateInputs, loaded: Iteration, setting: InstanceKnobs, *, room: Room, share: str
) -> str:
    """Say why the engine's longest request does not fit at its start; empty where it does."""
    if not loaded.memory_rule.wants_whole_length or inputs.launch.shortens_length:
        return ""
    whole = inputs.demand.most_tokens
    needed = _admission_bytes(loaded, setting, tokens=whole)
    if needed <= room.cache_bytes:
        return ""
    longest_held = _longest_held(inputs, loaded, setting, room=room)
    cache = format_bytes(int(room.cache_bytes))
    return (
        f"the engine wants room for one request of {whole} tokens, which takes"
        f" {format_bytes(int(needed))}; {share} leaves {cache} of cache a device, enough for one of"
        f" {longest_held} tokens"
    )


def _admission_bytes(iteration: Iteration, setting: InstanceKnobs, *, tokens: int) -> float:
    return admission_bytes(iteration, tokens=float(tokens), step_tokens=setting.step_tokens)


def _share_words(inputs: EstimateInputs) -> str:
    return "engine's default" if inputs.launch.memory_ratio is None else "stated"


def logged_tokens(inputs: EstimateInputs, option: Option, setting: InstanceKnobs) -> int:
    """Tokens of a rank's KV cache as the engine logs them: of the longest requests."""
    loaded = _loaded(inputs, option.iteration, setting)
    rule, room = loaded.memory_rule, _room(inputs, loaded, setting)
    longest = inputs.demand.most_tokens
    if inputs.launch.state_ratio is not None:
        return int(max(_tokens(inputs, loaded, room, request_tokens=float(longest)), 0.0))
    token_bytes = _admission_bytes(loaded, setting, tokens=longest) / longest
    pool = instance_block_pool(loaded)
    if pool is not None and rule.blocks is not None and rule.blocks.logs_groups:
        token_bytes = pool.token_bytes
    tokens = int(max(room.cache_bytes / token_bytes, 0.0))
    max_tokens = inputs.launch.most_cached_tokens
    return tokens if max_tokens is None else min(tokens, max_tokens)


def instances_needed(inputs: EstimateInputs, option: Option) -> int:
    """Instances that the traffic's rate needs; where it sets its rate, those that there are."""
    if inputs.goal.traffic.sets_its_rate:
        return inputs.instances
    return max(1, math.ceil(inputs.demand.rate_per_s / option.rate_per_s))


def simulate_load(inputs: EstimateInputs, option: Option) -> ServingLoad:
    """Simulate the traffic on the launch's instances."""
    group = InstanceGroup(option=option, count=inputs.instances)
    simulated = corrected_result(_simulate(inputs, group), (group,), goal=inputs.goal)
    served = simulated.requests_per_s
    if not inputs.goal.traffic.sets_its_rate:
        served = min(served, group.rate_per_s)
    share = served / max(simulated.requests_per_s, 1e-9)
    devices = group.count * option.devices
    missed = simulated.missed(inputs.goal.slo)
    has_tpot = option.role is not Role.PREFILL and len(simulated.tpot_s_R) > 0
    return ServingLoad(
        devices=devices,
        ttft_s=None if option.role is Role.DECODE else latency_of(simulated.ttft_s_R),
        tpot_s=latency_of(simulated.tpot_s_R) if has_tpot else None,
        other_half_s=_other_half_s(inputs, option.role, simulated),
        requests_per_s=served,
        output_tokens_per_s=0.0
        if option.role is Role.PREFILL
        else simulated.output_tokens_per_s * share,
        goodput_per_device=served * simulated.met_ratio / devices,
        capacity_per_s=max(group.rate_per_s, served),
        keeps_up=instances_needed(inputs, option) <= inputs.instances,
        missed=missed,
    )


def _other_half_s(inputs: EstimateInputs, role: Role, simulated: SimulationResult) -> float:
    """Return the seconds of a mean request that are not spent in a launch of this role."""
    if role is Role.DECODE:
        return latency_of(simulated.ttft_s_R).mean
    further = max(inputs.demand.output_tokens - 1.0, 0.0)
    return further * latency_of(simulated.tpot_s_R).mean if role is Role.PREFILL else 0.0


def _simulate(inputs: EstimateInputs, group: InstanceGroup) -> SimulationResult:
    goal, demand, option = inputs.goal, inputs.demand, group.option
    if option.role is Role.AGGREGATED:
        return simulate_aggregated_mode((group,), goal=goal, demand=demand)
    idle = inputs.beside or other_half(inputs, group)
    pair = (group, idle) if option.role is Role.PREFILL else (idle, group)
    options = (option, idle.option)
    return simulate_disaggregated_mode(
        *pair,
        kv_transfers=launch_transfers(inputs, options),
        goal=goal,
        demand=demand,
        most_requests=max(ROLE_REQUESTS, 2 * (demand.concurrency or 0)),
    )


def launch_transfers(inputs: EstimateInputs, options: tuple[Option, ...]) -> KvTransfers:
    """Return the KV transfers of a launch, by its connector and its variables.

    A launch that leaves no device for the other half sends to another machine; one whose variables
    exclude NICs shares its machines with the other half.
    """
    launch, pool = inputs.launch, inputs.serving_pool.pool
    is_whole = inputs.instances * options[0].devices >= pool.num_devices
    made = build_kv_transfers(inputs.spec, input_tokens=inputs.demand.input_tokens, options=options)
    link = made.releases[pool.name].node_links.get(launch.connector)
    return replace(
        made,
        is_packed=link is not None and link.excludes_nics and link.is_set(launch.environment),
        environment=launch.environment,
        named="network" if is_whole else launch.connector,
    )


def other_half(inputs: EstimateInputs, group: InstanceGroup) -> InstanceGroup:
    """Return instances of the other role, of a launch's degrees, that are never its bottleneck."""
    demand, option = inputs.demand, group.option
    half = price_option(
        replace(inputs, launch=replace(inputs.launch, role=other_role(option), ffn_devices=0)),
        replace(inputs.launch.setting, degrees=option.degrees, running=MOST_RUNNING),
    )
    comes_per_s, limit = demand.rate_per_s, MOST_REQUESTS
    if demand.concurrency is not None:
        comes_per_s, limit = group.rate_per_s, demand.concurrency
    many = min(max(1, math.ceil(IDLE_FACTOR * comes_per_s / half.rate_per_s)), limit)
    # It is not part of the launch: its memory never makes requests wait either.
    return InstanceGroup(option=replace(half, kv_tokens=math.inf), count=many)


def other_role(option: Option) -> Role:
    """Return what instances beside a prefill or decode launch do."""
    return Role.DECODE if option.role is Role.PREFILL else Role.PREFILL


def device_memory(inputs: EstimateInputs, option: Option, setting: InstanceKnobs) -> ServingMemory:
    """Return the memory of one device."""
    iteration, demand = _loaded(inputs, option.iteration, setting), inputs.demand
    token_bytes = instance_kv_bytes_per_token(iteration, request_tokens=demand.held_tokens)
    cached = option.kv_tokens * token_bytes
    if inputs.launch.state_ratio is not None:
        cached = _room(inputs, iteration, setting).cache_bytes
    return ServingMemory(
        weight_bytes=int(instance_weight_bytes(iteration)),
        cache_bytes=int(max(cached, 0.0)),
        reserve_bytes=int(launch_reserve(inputs, iteration, setting).total),
        device_bytes=int(inputs.serving_pool.memory_bytes),
        limit_ratio=max(_room(inputs, iteration, setting).ratio, 0.0),
    )


def to_plan_instances(inputs: EstimateInputs, option: Option, setting: InstanceKnobs) -> Instances:
    """Return the launch's instances as a plan stores them."""
    degrees, backend = option.degrees, setting.a2a_backend
    is_cell = isinstance(option.iteration, RemoteFfnIteration)
    has_experts = inputs.decoder.experts is not None and not is_cell
    has_attention_dp = degrees.attention_data > 1
    if not has_attention_dp and backend == "allgather":
        backend = "none"
    return Instances.model_validate(
        {
            "role": Role.ATTENTION if is_cell else option.role,
            "pool": inputs.serving_pool.pool.name,
            "count": inputs.instances,
            "devices": degrees.devices,
            "attention_tp": degrees.attention_tensor,
            "attention_dp": degrees.attention_data,
            "moe_tp": degrees.moe_tensor if has_experts else 1,
            "ep": degrees.expert if has_experts else 1,
            "pp": degrees.pipeline,
            "stage_machines": degrees.stage_machines,
            "dcp": degrees.context,
            "max_batch": option.running,
            "max_batched_tokens": option.step_tokens,
            "chunked_prefill": option.is_chunked,
            "page_size": option.page_tokens,
            "draft_tokens": setting.draft_tokens,
            "two_batch_overlap": setting.two_batch_overlap,
            "redundant_experts": setting.redundant_experts,
            "a2a_backend": "allgather" if has_attention_dp and backend == "none" else backend,
            "kv_tokens": int(max(option.kv_tokens, 0.0) * degrees.attention_data),
            "memory_ratio": inputs.launch.memory_ratio,
        }
    )
