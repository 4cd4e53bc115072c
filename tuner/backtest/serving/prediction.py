"""TTFT and TPOT of a launch: prices its steps and simulates its load.

Both are means over requests as seen by clients (tuner/simulate/serving/client.py), with the polling
and streaming that the row states.

Disaggregated launches: prompts wait for a prefill rank, their KV cache is transferred, and they
join the decode ranks.

Load: a closed loop of C requests, 10 C in all, of lengths even between a share of the nominal and
the nominal. Attention-data ranks are assumed to share requests evenly, so that one
is simulated.
"""

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tuner.backtest.serving.launches import PublishedLaunch, RoleWorkers
from tuner.catalog.serve_rules.traits import Batching
from tuner.costs.serve.capacity import cache_tokens
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.kv_transfer import KV_TRANSFER_LATENCY_S, NIC_RATIO, KvPath, whole_s
from tuner.costs.serve.memory import kv_bytes_per_token, state_bytes_per_request
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import ServingMachine
from tuner.simulate.serving.batching import Rules
from tuner.simulate.serving.client import (
    DELAY_S,
    ROUNDS,
    ClientOverhead,
    client_observed_ttft_s,
    engine_rules,
    prefill_step_seconds,
    waiting_ranks,
)
from tuner.simulate.serving.disaggregated import Stations, simulate_disaggregated
from tuner.simulate.serving.load import Served, uniform_requests
from tuner.simulate.serving.lockstep import simulate_ranks
from tuner.simulate.serving.steps import StepTimes, step_times

UNNAMED_RELEASE: Final = "0"
"""Release of rows that name none, or a nightly one: they are of 2025 and early 2026, before the
newest memory rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLatency:
    """Means over requests."""

    ttft_s: float
    tpot_s: float
    estimated: tuple[str, ...] = ()
    """Operations without a measured table."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """Steps of one side of a launch, and their operations without a measured table."""

    times: StepTimes
    estimated: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictor:
    """Machines by system; prices that several rows share are cached."""

    machines: dict[str, ServingMachine]
    steps: dict[tuple[object, ...], Priced] = field(default_factory=dict)

    def latency(self, launch: PublishedLaunch) -> MeanLatency:
        """Predict one launch."""
        if launch.is_disaggregated:
            return self._disaggregated(launch)
        return self._aggregated(launch)

    def _iteration(self, launch: PublishedLaunch, side: RoleWorkers) -> Iteration:
        return Iteration(
            decoder=launch.decoder,
            formats=launch.formats,
            degrees=side.degrees,
            traits=ENGINE_TRAITS[launch.engine],
            machine=self.machines[launch.system],
            sequence_s=launch.sequence_s,
            experts_table=launch.experts_table,
            drafting=launch.drafting,
            release=launch.release if launch.release[:1].isdigit() else UNNAMED_RELEASE,
        )

    def _disaggregated(self, launch: PublishedLaunch) -> MeanLatency:
        prefill, decode = launch.sides
        reading = self._iteration(launch, prefill)
        writing = self._iteration(launch, decode)
        ranks = decode.workers * decode.degrees.attention_data
        rank_sequences = -(-launch.concurrency // ranks)
        rules = self._rules(launch, writing, rank_sequences)
        decoding = self._times(
            launch, writing, rank_sequences, replace(rules, step_tokens=rank_sequences)
        )
        shared = replace(rules, step_tokens=launch.input_tokens)
        prompts = self._times(launch, reading, 1, shared)
        full = prompts.times
        isolated = self._times(launch, replace(reading, busy_ratio=0.0), 1, shared).times
        most_busy = prefill.degrees.attention_data
        token_bytes = kv_bytes_per_token(launch.decoder, launch.formats, InstanceDegrees())
        state = state_bytes_per_request(
            launch.decoder, InstanceDegrees(), states=reading.memory_rule.states.sent
        )
        nic_bytes_per_s = reading.machine.sheet.scale_out_bytes_per_s
        path = KvPath(
            network_bytes_per_s=NIC_RATIO * nic_bytes_per_s, latency_s=KV_TRANSFER_LATENCY_S
        )
        stations = Stations(
            prefill_workers=prefill.workers,
            prefill_ranks=most_busy,
            prompt_s=prefill_step_seconds(
                full,
                isolated,
                ranks=most_busy,
                step_tokens=launch.input_tokens,
                computed_ratio=1.0 - launch.prefix_ratio,
            ),
            prefill_slot_ratio=reading.slot_ratio,
            kv_transfer_s=lambda tokens: whole_s(token_bytes * tokens + state, path=path),
            decode_ranks=ranks,
            decode=decoding.times,
            kv_tokens=rules.kv_tokens,
        )
        requests = uniform_requests(
            ROUNDS * launch.concurrency,
            input_tokens=launch.input_tokens,
            output_tokens=launch.output_tokens,
            least_ratio=launch.length_ratio,
            seed=launch.concurrency,
        )
        served = simulate_disaggregated(requests, stations=stations, concurrency=launch.concurrency)
        estimated = prompts.estimated | decoding.estimated
        return mean_latency(served, launch, estimated=tuple(sorted(estimated)))

    def _aggregated(self, launch: PublishedLaunch) -> MeanLatency:
        side = launch.sides[0]
        iteration = self._iteration(launch, side)
        data = side.degrees.attention_data
        concurrency = max(-(-launch.concurrency // data), 1)
        rules = self._rules(launch, iteration, concurrency)
        priced = self._times(launch, iteration, concurrency, rules)
        requests = uniform_requests(
            ROUNDS * concurrency,
            input_tokens=launch.input_tokens,
            output_tokens=launch.output_tokens,
            least_ratio=launch.length_ratio,
            delay_s=DELAY_S,
            seed=launch.concurrency,
        )
        if launch.prefix_ratio:
            cached_R = np.floor(launch.prefix_ratio * requests.input_R).astype(np.int64)
            requests = replace(requests, cached_R=np.minimum(cached_R, requests.input_R - 1))
        ranks = waiting_ranks(iteration)
        served = simulate_ranks(
            requests, times=priced.times, rules=rules, ranks=ranks, concurrency=concurrency
        )
        return mean_latency(served, launch, estimated=tuple(sorted(priced.estimated)))

    def _rules(self, launch: PublishedLaunch, iteration: Iteration, concurrency: int) -> Rules:
        traits = ENGINE_TRAITS[launch.engine]
        longest = launch.input_tokens + launch.output_tokens
        step_tokens = launch.step_tokens or traits.step_tokens
        if traits.batching is Batching.WHOLE:
            step_tokens = max(step_tokens, concurrency + launch.input_tokens + 64)
        return engine_rules(
            traits,
            step_tokens=step_tokens,
            poll_steps=launch.poll_steps,
            kv_tokens=cache_tokens(
                iteration,
                memory_bytes=iteration.machine.sheet.memory_bytes,
                step_tokens=step_tokens,
                running=concurrency,
                request_tokens=float(longest),
                least=2.0 * longest,
            ),
        )

    def _times(
        self, launch: PublishedLaunch, iteration: Iteration, concurrency: int, rules: Rules
    ) -> Priced:
        longest = launch.input_tokens + launch.output_tokens
        most_sequences = 1 << max(concurrency, 1).bit_length()
        tokens = rules.step_tokens + most_sequences
        key = (
            launch.system,
            launch.engine,
            launch.decoder.name,
            launch.formats,
            iteration.degrees,
            iteration.sequence_s,
            iteration.experts_table,
            iteration.busy_ratio,
            iteration.drafting,
            iteration.largest_prompt_graph,
            iteration.release,
            longest,
            most_sequences,
            tokens,
        )
        if key not in self.steps:
            # A separate set: the machine's own collects all launches priced on it.
            machine = replace(iteration.machine, estimated=set())
            times = step_times(
                replace(iteration, machine=machine),
                most_tokens=tokens,
                most_sequences=most_sequences,
                longest=longest,
            )
            self.steps[key] = Priced(times=times, estimated=frozenset(machine.estimated))
        return self.steps[key]


def mean_latency(
    served: Served, launch: PublishedLaunch, *, estimated: tuple[str, ...]
) -> MeanLatency:
    """Return means as a client sees them."""
    tpot_s = float(np.mean(served.tpot_s_R)) if (served.output_R > 1).any() else 0.0
    client = ClientOverhead(
        overhead_s=ENGINE_TRAITS[launch.engine].client_s, stream_steps=launch.stream_steps
    )
    ttft_s = float(np.mean(client_observed_ttft_s(served, client=client)))
    return MeanLatency(ttft_s=ttft_s, tpot_s=tpot_s, estimated=estimated)
