"""The values of a profile: what was measured (Case), the times (Measurement), where (Machine).

Units are SI throughout. A `Measurement` keeps every timed repeat; medians are derived, not stored.
"""

import ast
import inspect
import statistics
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from profilers.numbers_only import numbers_only

if TYPE_CHECKING:
    from pandas import DataFrame

SCHEMA_VERSION = 1
# 1: first release. Tables were added since, from windowed_attention on, for imports: a profile
#    without them reads as before, and an older release names the table that it does not know.
#    `TableInfo.checked` was added likewise.

LEAST_S: Final = 1e-12
"""No message, and no work of a rank, takes less."""
MOST_S: Final = 1e9
"""No repeat takes longer: three decades."""
MOST: Final = 2**63 - 1
"""Largest integer that a column of a table can hold."""
MOST_RANKS: Final = 2**20

Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Repeat = Annotated[float, Field(ge=0.0, le=MOST_S, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=MOST)]


class Record(BaseModel):
    """Base of everything that is stored: immutable, strict about its keys and its numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        schema: core_schema.CoreSchema = numbers_only(handler(source))
        return schema

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe each field by the docstring beneath it, read only where a schema is wanted."""
        shown = handler(schema)
        described = handler.resolve_ref_schema(shown).get("properties", {})
        for owner in cls.__mro__[: cls.__mro__.index(Record)]:
            for name, docstring in _attribute_docstrings(owner).items():
                described.get(name, {}).setdefault("description", docstring)
        return shown


@cache
def _attribute_docstrings(owner: type) -> Mapping[str, str]:
    docstrings = {}
    definition = ast.parse(dedent(inspect.getsource(owner))).body[0]
    for field, docstring in pairwise(getattr(definition, "body", ())):
        match field, docstring:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                docstrings[name] = inspect.cleandoc(text)
    return docstrings


class Source(StrEnum):
    """Origin of a number."""

    MEASURED = "measured"
    """Timed on the machine that the profile describes."""
    IMPORTED = "imported"
    """Taken from somebody else's measurement of the same kind of device."""
    DATASHEET = "datasheet"
    """Derived from published peak rates."""


class MeasurementStatus(StrEnum):
    """Outcome of a measurement."""

    OK = "ok"
    """Timed; `times_s` holds at least one repeat."""
    OUT_OF_MEMORY = "out_of_memory"
    """The device could not hold the operands."""
    FAILED = "failed"
    """The kernel raised; `error` says what."""


Direction = Literal["forward", "backward", ""]
"""Half of training that an operation belongs to; empty where there is no such half."""

MEASURED_DTYPES: Final = ("bf16", "fp32")
"""Types of operands. fp16 is left out: processors compute it a hundred times slower than either."""

AXES: Mapping[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "grouped_gemm": ("experts", "tokens", "largest", "hidden", "ffn"),
    "attention": ("batch", "sequence", "heads", "kv_heads", "head_dim"),
    "decode_attention": ("batch", "past", "heads", "kv_heads", "head_dim", "window"),
    "linear_scan": (
        "batch",
        "sequence",
        "heads",
        "key_heads",
        "key_dim",
        "value_dim",
        "chunk",
    ),
    "linear_update": ("batch", "heads", "key_heads", "key_dim", "value_dim"),
    "index_scores": ("batch", "sequence", "past", "heads", "head_dim", "top_k"),
    "memory_bound": ("rows", "width"),
    "optimizer": ("parameters",),
    "copy": ("bytes",),
    "collective": ("bytes", "ranks", "stride", "world"),
    "rendezvous": ("work_us", "ranks", "stride", "world"),
    "link": ("bytes", "sender", "receiver", "lanes", "world"),
    "every_rank": ("size", "world"),
    "storage": ("bytes",),
    "background_save": ("bytes",),
    "host_memory": ("bytes",),
    "restart": ("ranks",),
    "checkpoint_load": ("bytes",),
    "kv_conversion": (
        "tokens",
        "heads",
        "width",
        "page_from",
        "page_to",
        "tensor_from",
        "tensor_to",
    ),
    "windowed_attention": ("batch", "sequence", "heads", "kv_heads", "head_dim", "window"),
    "latent_attention": ("batch", "sequence", "heads"),
    "latent_decode": ("batch", "past", "heads"),
    "moe": ("tokens", "hidden", "ffn", "top_k", "experts", "tensor", "expert"),
    "expert_all_to_all": ("tokens", "hidden", "top_k", "experts", "ranks", "nodes", "units"),
    "latent_product": ("tokens", "heads"),
    "sparse_latent_attention": ("batch", "past", "sequence", "heads"),
    "sparse_latent_decode": ("batch", "past", "heads"),
    "gated_delta": ("batch", "sequence", "key_heads", "value_heads"),
}
"""The integer columns of each operation's table.

gemm          y[m, n] = x[m, k] w[n, k]^T through autograd; backward is both gradient GEMMs
grouped_gemm  the SwiGLU expert FFN: gate and up, product, down; `tokens` rows over `experts`, the
              most-loaded expert holding `largest` of them
attention     causal scaled-dot-product attention with grouped queries
decode_attention  one new token for each of `batch` sequences that hold `past` tokens; `window` 0
              where it looks back on all of them. `kind` names the stored keys' type where it is not
              the dtype (imported only)
linear_scan   linear attention in chunks, from queries, keys, values and decays to its output;
              `kind`: mamba2, gated_delta, kda (see profilers/kernels/linear_scan.py)
linear_update  the same for one new token of each of `batch` sequences, whose states of `heads` x
              `key_dim` x `value_dim` are fp32 and written in place
index_scores  an indexer's scores of `sequence` new tokens of each of `batch` sequences, the last of
              which sees `past` keys, and the `top_k` best of each (see
              profilers/kernels/index_scores.py)
memory_bound  `kind` names it (see profilers/kernels/memory_bound.py)
optimizer     one AdamW step over `parameters` elements
copy          `kind`: device, host_to_device, device_to_host
collective    `kind` names it; `bytes` is the message as NCCL's tests count it, per rank; groups of
              `ranks` processes `stride` apart in a job of `world`, all groups at once; the time of
              a repeat is that of the slowest rank
rendezvous    arrival skew: seconds lost at a collective of the group after `work_us` of work on
              each rank, see profilers/links/arrival_skew.py
link          a message of `bytes` from rank `sender` to rank `receiver` in a job of `world`, while
              other pairs send too and `lanes` pairs of the same two nodes side by side; `kind`:
              one_way, round_trip, see profilers/links/pairs.py
every_rank    the same work on every rank at once, a row a rank; `kind`: gemm of `size` squared,
              copy of `size` bytes, see profilers/links/every_rank.py
storage       `kind`: write, read
background_save  `bytes` saved beside GEMMs; of older profiles, read by nothing
host_memory   `bytes` into host memory; `kind`: fresh, save, load, see profilers/host_memory.py
restart       `kind`: a phase of starting the processes of `ranks` ranks anew; of older profiles,
              read by nothing
checkpoint_load  `bytes` of a rank; `kind`: distributed, see profilers/checkpoint_load.py
kv_conversion  one layer of a request's KV cache, from the pages of `tensor_from` ranks into those
              of `tensor_to` others, all on one device; `kind`: layout from and to, or latent, and
              the receiver's type where it is not the dtype, see profilers/kv_transfer/suite.py

Imported only, because nothing above can hold them:

windowed_attention  causal attention in which a token looks back on `window` tokens
latent_attention    MLA of DeepSeek-V3's widths over whole sequences; `kind`: core is the kernel
                    only, module includes the projections around it
latent_decode       the same for one new token per sequence
moe                 routed experts, from the routed tokens to their weighted sum, on the most
                    loaded rank of `expert` x `tensor` that share `tokens` tokens; `kind` names the
                    load distribution
expert_all_to_all   dispatch or combine of `tokens` per rank over `ranks` on `nodes`; `kind` names
                    library, mode and half; `units` multiprocessors serve it, 0: not said
latent_product      the batched GEMMs of absorbed MLA; `kind`: pre is the queries', post the
                    values'
sparse_latent_attention  DeepSeek's sparse attention with its projections and indexer: `sequence`
                    new tokens after `past`; `kind` begins with the class of the model
sparse_latent_decode  the same for one new token per sequence
gated_delta         gated delta rule of Qwen3.5's linear layers, heads of 128; `kind`: context or
                    generation, and which of its kernels
"""


BETWEEN_PEERS: Final = ("link", "every_rank")
"""Operations whose times are compared between ranks, and whose rows name ranks."""


class Case(Record):
    """One thing to measure: an operation at one size."""

    operation: str
    """A key of `AXES`."""
    kind: str = ""
    """Variant within the operation, e.g. `rms_norm` or `all_to_all`."""
    dtype: str = ""
    """`bf16`, `fp32`, ... or empty where it does not matter."""
    direction: Direction = ""
    axes: dict[str, int]
    """Size along each axis of the operation."""

    @model_validator(mode="after")
    def _axes_match(self) -> "Case":
        if self.operation not in AXES:
            raise ValueError(f"operation {self.operation!r} is not one of {', '.join(AXES)}")
        expected = AXES[self.operation]
        if tuple(sorted(self.axes)) != tuple(sorted(expected)):
            raise ValueError(f"{self.operation} needs the axes {expected}, got {tuple(self.axes)}")
        negative = [name for name, size in self.axes.items() if size < 0]
        if negative:
            raise ValueError(f"{self.operation}: axis {negative[0]} is negative")
        if endless := [name for name, size in self.axes.items() if size > MOST]:
            raise ValueError(f"{self.operation}: axis {endless[0]} is more than {MOST}")
        return self

    @property
    def id(self) -> str:
        """Stable name, e.g. `gemm/bf16/forward/m1024-n256-k256`."""
        sizes = "-".join(f"{axis}{self.axes[axis]}" for axis in AXES[self.operation])
        parts = (self.operation, self.kind, self.dtype, self.direction, sizes)
        return "/".join(part for part in parts if part)


class Measurement(Record):
    """Repeated timings of one case on one rank."""

    case: Case
    status: MeasurementStatus = MeasurementStatus.OK
    error: str = ""
    """One line, empty when the status is ok."""
    source: Source = Source.MEASURED
    rank: Count = 0
    """The rank that timed it; collectives are reduced over ranks and stored once, as rank 0."""
    times_s: tuple[Repeat, ...] = ()
    """One entry per timed repeat, warm-ups excluded."""

    @model_validator(mode="after")
    def _payload_agrees(self) -> "Measurement":
        if (self.status is MeasurementStatus.OK) != bool(self.times_s):
            raise ValueError(f"status {self.status} with {len(self.times_s)} repeats")
        if self.case.operation in BETWEEN_PEERS and any(
            time_s < LEAST_S for time_s in self.times_s
        ):
            shortest_s = min(self.times_s)
            raise ValueError(
                f"{self.case.operation}: a repeat of {shortest_s:g} s; none takes less than "
                f"{LEAST_S:g} s"
            )
        return self

    @property
    def median_s(self) -> float:
        """Median of the repeats, in seconds."""
        return statistics.median(self.times_s)

    @property
    def expected_s(self) -> float:
        """Return the mean seconds of one of many calls.

        The mean of the repeats up to three medians: a step adds up hundreds of calls, so their skew
        counts, which a median leaves out; a pause of the whole machine is not the call's. That
        leaves out what collectives wait, too, which profilers/series.py adds.
        """
        limit_s = 3.0 * self.median_s
        return statistics.fmean(time_s for time_s in self.times_s if time_s <= limit_s)


class Machine(Record):
    """Identity of the machine; without it a number is worthless."""

    hostname: str
    device: str
    """Marketing name of the accelerator, or of the processor when there is none."""
    device_kind: Literal["cpu", "cuda"]
    num_devices: Count
    """Accelerators on this node, or processor cores usable by this process."""
    memory_bytes_per_device: Count
    cores: Count
    host_memory_bytes: Count
    nodes: Count = 1
    world: Annotated[int, Field(ge=0, le=MOST_RANKS)]
    """Ranks that took part in the measurement."""
    threads_per_rank: Count
    oversubscribed: bool
    """Whether ranks outnumber cores (or accelerators): latencies are then not those of a real
    cluster."""
    driver: str = ""
    libraries: dict[str, str]
    """Version by name: python, torch, cuda, nccl, ..."""
    clocks: dict[str, Annotated[float, Field(ge=0.0, allow_inf_nan=False)]] = {}
    """Hertz by name, where they can be read."""
    topology: str = ""
    """Links between accelerators, in the vendor's words."""
    hosts: tuple[str, ...] = ()
    """Name of the host of every rank; empty in profiles of one rank and of earlier releases."""
    ranks_per_node: Count = 0
    """Consecutive ranks that share a node; 0 where it was not noted."""

    @model_validator(mode="after")
    def _every_rank_has_a_host(self) -> "Machine":
        if self.hosts and len(self.hosts) != self.world:
            raise ValueError(f"hosts names {len(self.hosts)} hosts for {self.world} ranks")
        return self

    @property
    def takes_turns(self) -> bool:
        """Return whether a host has more ranks than cores, so that they run in turns."""
        return self.oversubscribed and self.device_kind == "cpu"

    def differences(self, reference: "Machine") -> tuple[str, ...]:
        """Name what makes the two machines not comparable, one entry per differing fact."""
        facts = ("device", "device_kind", "memory_bytes_per_device", "threads_per_rank", "driver")
        differing = [
            f"{fact}: {getattr(self, fact)!r} here, {getattr(reference, fact)!r} there"
            for fact in facts
            if getattr(self, fact) != getattr(reference, fact)
        ]
        for library in sorted(self.libraries.keys() & reference.libraries.keys()):
            mine, theirs = self.libraries[library], reference.libraries[library]
            if mine != theirs:
                differing.append(f"{library}: {mine!r} here, {theirs!r} there")
        return tuple(differing)


class Checked(Record):
    """Errors of interpolation at measured sizes that were left out of the fit."""

    sizes: Count
    """Sizes drawn at random between the measured ones; each direction of one counts below."""
    median_ratio: float
    """Median of |predicted / measured - 1|."""
    p90_ratio: float
    """90th percentile of |predicted / measured - 1|."""


class TableInfo(Record):
    """Extent and accuracy of one table of the profile."""

    rows: Count
    complete: bool
    """False while a run is under way or after it was interrupted."""
    seconds: Seconds
    """Wall time spent on it."""
    note: str = ""
    """Note to the reader, e.g. that the time budget cut the table short."""
    checked: Checked | None = None
    """Error of interpolating in it, where that was checked; absent in earlier releases."""


class ProfileHeader(Record):
    """`profile.json`."""

    schema_version: int = SCHEMA_VERSION
    moetune_version: str
    created: str
    """ISO 8601, UTC."""
    machine: Machine
    tables: dict[str, TableInfo]
    """Tables by operation; the rows lie beside, in `<operation>.parquet`."""

    @field_validator("schema_version")
    @classmethod
    def _known_version(cls, value: Any) -> Any:
        if value != SCHEMA_VERSION:
            raise ValueError(f"schema_version {value} is not {SCHEMA_VERSION}")
        return value


class Profile(Record):
    """A stored profile, read into memory."""

    header: ProfileHeader
    measurements: tuple[Measurement, ...]

    def table(self, operation: str) -> "DataFrame":
        """Return every row of one operation as a data frame.

        Its columns are those that are stored (profilers/tables.py), and `median_s`, which is NaN
        for a row that failed.

        Raises:
            ValueError: there is no such operation.
        """
        from profilers.tables import case_table

        return case_table(self.measurements, operation=operation)

    def rows(self, operation: str) -> tuple[Measurement, ...]:
        """Every successful row of one operation, in stored order."""
        return tuple(
            row
            for row in self.measurements
            if row.case.operation == operation and row.status is MeasurementStatus.OK
        )
