"""All parallel degrees and schedules of a number of devices: legal ones listed, others counted.

The space of all combinations is

    tensor * context * pipeline * data = devices            every ordered factorisation
    virtual_pipeline = 1, or with a pipeline 2 .. layers // pipeline
    micro_batch | global batch
    expert * expert_tensor | tensor * context * data        Megatron's parallel folding

It is expanded in that order. A combination that breaks a rule excludes everything below it, which
is counted and never listed, so that the work is in proportion to what is legal. The expert degrees
stay separate from the others: a legal combination is a partial row (dense degrees and schedule)
with one of the expert pairs of its dense degrees. Where replicas may run unequal numbers of
micro-batches, which pairs are legal in a pipeline depends on `common`, the greatest common divisor
of micro-batches and replicas: equal degrees are listed once for each. `copies` says how many copies
of the training state there are where each stays in one scale-up domain. It follows from the
degrees:

    gcd(data, data * context / ranks of one domain, expert data)

so that every copy is whole, experts included (tuner/prices/train/collectives.py).

Letters: D dense degrees, N partial rows, E expert pairs, ordered by their dense degrees.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from tuner.arrays import Ints
from tuner.search.train.problem import TrainProblem
from tuner.search.train.rules import (
    Rule,
    dense_rules,
    divisors,
    expert_rules,
    first_broken,
    schedule_rules,
)

Table = Mapping[str, Ints]
"""Columns of one length by name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Degrees:
    """The legal combinations, and how many break which rule."""

    dense_D: Table
    """Columns tensor, context, pipeline, data, and common where replicas may run unequal numbers of
    micro-batches."""
    partials_N: Table
    """Columns dense (index into D), virtual_pipeline, micro_batch."""
    pairs_E: Table
    """Columns dense (index into D, ascending), expert, expert_tensor, copies."""
    illegal: Mapping[str, int]
    """Combinations by the first rule they break."""

    @property
    def num_partials(self) -> int:
        """N."""
        return len(self.partials_N["dense"])

    @property
    def num_pairs_N(self) -> Ints:
        """Expert pairs of each partial row."""
        return self._num_pairs_D[self.partials_N["dense"]]

    @property
    def num_legal(self) -> int:
        """Partial rows times the expert pairs of their degrees."""
        return int(self.num_pairs_N.sum())

    def rows(self, partials: Ints) -> Table:
        """List the rows of some partial rows: every expert pair of each, in their order."""
        dense = self.partials_N["dense"][partials]
        repeats = self._num_pairs_D[dense]
        first = np.searchsorted(self.pairs_E["dense"], dense)
        partial, pair = expand_runs(repeats, first)
        dense_rows = self.dense_rows(dense)
        schedule = {
            name: self.partials_N[name][partials] for name in ("virtual_pipeline", "micro_batch")
        }
        return {
            **take_rows(dense_rows | schedule, partial),
            "expert": self.pairs_E["expert"][pair],
            "expert_tensor": self.pairs_E["expert_tensor"][pair],
            "copies": self.pairs_E["copies"][pair],
        }

    def dense_rows(self, dense: Ints) -> dict[str, Ints]:
        """Return the dense degrees of some of D."""
        return take_rows(self.dense_D, dense)

    @property
    def _num_pairs_D(self) -> Ints:
        return np.bincount(self.pairs_E["dense"], minlength=len(self.dense_D["tensor"]))


def legal_degrees(problem: TrainProblem, *, without: frozenset[str] = frozenset()) -> Degrees:
    """List the legal combinations and count the others by rule.

    Args:
        problem: the model, batch, devices, targets and limits.
        without: texts of rules that are not applied.
    """
    illegal: Counter[str] = Counter()
    micro_batches = divisors(problem.global_batch_size)
    dense = _factorisations(problem.num_devices)
    virtual_D = _num_virtual(problem, dense["pipeline"])
    pairs_of_ranks = {
        int(ranks): _expert_pairs(int(ranks))
        for ranks in np.unique(problem.num_devices // dense["pipeline"])
    }
    all_pairs_D = np.array(
        [
            len(pairs_of_ranks[int(ranks)]["expert"])
            for ranks in problem.num_devices // dense["pipeline"]
        ]
    )
    legal = filter_legal(
        dense,
        weight=virtual_D * len(micro_batches) * all_pairs_D,
        rules=_without_rules(dense_rules(problem), without),
        illegal=illegal,
    )
    dense, virtual_D, all_pairs_D = take_rows(dense, legal), virtual_D[legal], all_pairs_D[legal]
    partials = _all_partials(dense, virtual_D, micro_batches)
    legal = filter_legal(
        partials,
        weight=all_pairs_D[partials["dense"]],
        rules=_without_rules(schedule_rules(problem), without),
        illegal=illegal,
    )
    partials = take_rows(
        {name: partials[name] for name in ("dense", "virtual_pipeline", "micro_batch")}, legal
    )
    if problem.capabilities.unequal_microbatches:
        dense, partials = _by_common(problem, dense, partials)
    pairs = _all_pairs(dense, pairs_of_ranks, problem.num_devices)
    partials_D = np.bincount(partials["dense"], minlength=len(dense["tensor"]))
    legal = filter_legal(
        pairs,
        weight=partials_D[pairs["dense"]],
        rules=_without_rules(expert_rules(problem), without),
        illegal=illegal,
    )
    pairs = take_rows(pairs, legal)
    kept = {name: pairs[name] for name in ("dense", "expert", "expert_tensor")}
    return Degrees(
        dense_D=dense,
        partials_N=partials,
        pairs_E=kept | {"copies": state_copies(problem, pairs)},
        illegal=dict(sorted(illegal.items())),
    )


def _without_rules(rules: Iterable[Rule], without: frozenset[str]) -> list[Rule]:
    return [rule for rule in rules if rule.text not in without]


def filter_legal(table: Table, *, weight: Ints, rules: list[Rule], illegal: Counter[str]) -> Ints:
    """Return the indices of what is legal; what is not is counted with its weight."""
    broken = first_broken(rules, table)
    for index, rule in enumerate(rules):
        count = int(weight[broken == index].sum())
        if count:
            illegal[rule.text] += count
    return np.flatnonzero(broken < 0)


def _factorisations(num_devices: int) -> dict[str, Ints]:
    """Every ordered tensor * context * pipeline * data = devices."""
    sizes = divisors(num_devices)
    tensor, context, pipeline = (
        grid.ravel() for grid in np.meshgrid(sizes, sizes, sizes, indexing="ij")
    )
    whole = num_devices % (tensor * context * pipeline) == 0
    tensor, context, pipeline = tensor[whole], context[whole], pipeline[whole]
    data = num_devices // (tensor * context * pipeline)
    return {"tensor": tensor, "context": context, "pipeline": pipeline, "data": data}


def _num_virtual(problem: TrainProblem, pipeline: Ints) -> Ints:
    """Choices of virtual stages: 1, and with a pipeline all that leave every stage a layer."""
    largest = np.maximum(1, problem.model.num_layers // pipeline)
    return np.where(pipeline > 1, largest, 1)


def _expert_pairs(ranks: int) -> dict[str, Ints]:
    sizes = divisors(ranks)
    expert, expert_tensor = (grid.ravel() for grid in np.meshgrid(sizes, sizes, indexing="ij"))
    whole = ranks % (expert * expert_tensor) == 0
    return {"expert": expert[whole], "expert_tensor": expert_tensor[whole]}


def _all_partials(dense: Table, virtual_D: Ints, micro_batches: Ints) -> dict[str, Ints]:
    repeats = virtual_D * len(micro_batches)
    index, within = expand_runs(repeats, np.zeros(len(repeats), dtype=np.int64))
    virtual, micro = np.divmod(within, len(micro_batches))
    chosen = {"virtual_pipeline": virtual + 1, "micro_batch": micro_batches[micro]}
    return take_rows(dense, index) | chosen | {"dense": index}


def _by_common(
    problem: TrainProblem, dense: Table, partials: Table
) -> tuple[dict[str, Ints], dict[str, Ints]]:
    """List dense degrees once for each `common` of their partial rows, without those of none."""
    index, data = partials["dense"], dense["data"][partials["dense"]]
    common = np.gcd(problem.global_batch_size // partials["micro_batch"], data)
    kinds, kind = np.unique(np.stack((index, common)), axis=1, return_inverse=True)
    return (
        take_rows(dense, kinds[0]) | {"common": kinds[1]},
        {**partials, "dense": kind.reshape(-1).astype(np.int64)},
    )


def _all_pairs(
    dense: Table, pairs_of_ranks: Mapping[int, Table], num_devices: int
) -> dict[str, Ints]:
    of_each = [pairs_of_ranks[int(ranks)] for ranks in num_devices // dense["pipeline"]]
    index = np.repeat(
        np.arange(len(of_each)), np.array([len(pairs["expert"]) for pairs in of_each], dtype=int)
    )
    pairs = {
        name: np.concatenate([np.zeros(0, dtype=np.int64), *(table[name] for table in of_each)])
        for name in ("expert", "expert_tensor")
    }
    return take_rows(dense, index) | pairs | {"dense": index}


def state_copies(problem: TrainProblem, pairs: Table) -> Ints:
    """Copies of the training state, one per scale-up domain, if the targets support it."""
    target = problem.capabilities
    # Stages of ZeRO that can have copies which save bytes, with a pipeline and in general.
    able = target.shard_ranks_zero_stages & target.zero_stages & {2, 3}
    in_pipeline = able & target.zero_stages_with_pipeline
    shared = pairs["data"] * pairs["context"]
    inside = np.clip(int(np.max(problem.hardware.domain)) // pairs["tensor"], 1, shared)
    expert_data = pairs["tensor"] * shared // (pairs["expert"] * pairs["expert_tensor"])
    copies = np.gcd(np.gcd(pairs["data"], shared // inside), expert_data)
    is_able = np.where(pairs["pipeline"] > 1, bool(in_pipeline), bool(able))
    copies_E: Ints = np.where(is_able, copies, 1)
    return copies_E


def expand_runs(count: Ints, start: Ints) -> tuple[Ints, Ints]:
    """Return the run of each entry and its place in the list, for runs of a list."""
    run = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
    return run, start[run] + within


def take_rows(rows: Table, chosen: Ints) -> dict[str, Ints]:
    """Select some rows."""
    return {name: column[chosen] for name, column in rows.items()}
