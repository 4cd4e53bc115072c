"""Record the routing of a model on text: what `moetune profile --suite routing` does.

    S ranks   P passes   L MoE layers   E experts

A pass is `sequences` sequences of `tokens` tokens on every rank: the batch that a step of training
or of prefill would have. Ranks that a launcher started read different sequences and are the source
ranks of the recording. Sequences that no longer fill a pass are dropped, unless there is no other.

Nothing is generated: the text is read once, as in prefill or training. Routing while decoding
differs in the text that the model writes itself.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from profilers.clock import HostClock
from profilers.errors import RecordingUnreadableError
from profilers.links.team import ConnectedTeam
from profilers.machine import fingerprint
from profilers.progress import Progress, ProgressEvent, silent
from profilers.ranks import from_environment
from profilers.records import ProfileHeader
from profilers.routing.capture.gates import gates_of, watched
from profilers.routing.capture.model import Loaded, load_model
from profilers.routing.capture.text import sequences
from profilers.routing.overrides import Naming
from profilers.routing.recording import Recording
from profilers.routing.store import FOLDER, WORKLOAD, write_recording
from profilers.routing.tally import MOST_TOKENS, Tally
from profilers.store import holds_profile, write_header
from profilers.team import SingleRank


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureInput:
    """What is read, and how much of it at once.

    Raises:
        ValueError: a size is not at least 1, or the name cannot be a folder's.
    """

    model: Path
    texts: tuple[Path, ...]
    workload: str
    tokens: int = 1024
    """Of a sequence."""
    sequences: int = 4
    """Of a pass, on every rank."""
    passes: int = 256
    """At most."""

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "passes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not at least 1")
        if WORKLOAD.fullmatch(self.workload) is None:
            raise ValueError(
                f"workload {self.workload[:80]!r} names a folder; take letters, digits, . _ -"
            )
        if not self.texts:
            raise ValueError("no text to read")


def capture(
    out: Path,
    reading: CaptureInput,
    *,
    progress: Progress = silent,
    environment: Mapping[str, str] = os.environ,
) -> Recording | None:
    """Record into `out`/routing/<workload>, beside the profile that `out` holds or now gets.

    Returns:
        The recording; None on ranks other than the first.

    Raises:
        ProfilerError: the model or a text cannot be read, or `out` cannot be written.
    """
    info = from_environment(environment)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", info.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    team: SingleRank | ConnectedTeam = SingleRank()
    if info.world > 1:
        team = ConnectedTeam(info, device=device, rendezvous=None)
    try:
        loaded = load_model(reading.model, device=device)
        mine = record(
            loaded, reading, device=device, rank=team.rank, world=team.world, progress=progress
        )
        recordings = team.gathered(mine)
        machine = fingerprint(
            device_kind=device.type, world=team.world, local_world=team.local_world
        )
    finally:
        team.close()
    if not recordings:
        return None
    recording = joined(recordings)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    if not holds_profile(out):
        header = ProfileHeader(
            moetune_version=version("moetune"), created=created, machine=machine, tables={}
        )
        write_header(out, header)
    origin = (
        f"captured from {loaded.model_type}, {reading.sequences * team.world} sequences of"
        f" {reading.tokens} tokens a pass, on {machine.device}"
    )
    write_recording(out / FOLDER / reading.workload, recording, origin=origin, created=created)
    return recording


def record(
    loaded: Loaded,
    reading: CaptureInput,
    *,
    device: torch.device,
    rank: int = 0,
    world: int = 1,
    progress: Progress = silent,
) -> Recording:
    """Read the text as one of `world` ranks.

    Raises:
        RecordingUnreadableError: the text is too short for so many ranks, or a sequence too long
            for the model.
    """
    if reading.tokens > loaded.longest:
        raise RecordingUnreadableError(
            f"sequences of {reading.tokens} tokens; {loaded.name} takes {loaded.longest} at most"
        )
    gates = gates_of(loaded.decoder, model_type=loaded.model_type)
    tally = Tally(
        num_experts=loaded.num_experts,
        tokens_per_forward=max(1, MOST_TOKENS // (reading.passes * world)),
    )
    watch = HostClock()
    started_s = watch.now_s()
    with torch.inference_mode(), watched(gates, top_k=loaded.top_k) as chosen:
        for number, rows in enumerate(_passes(loaded, reading, rank=rank, world=world)):
            loaded.decoder(input_ids=torch.tensor(rows, device=device), use_cache=False)
            ids = {layer: ids.cpu().numpy().astype(np.int32) for layer, ids in chosen.items()}
            tally.add(ids, number=number, source=rank)
            spent_s = watch.now_s() - started_s
            progress(
                ProgressEvent(
                    table=f"{FOLDER} {reading.workload}",
                    done=number + 1,
                    total=reading.passes,
                    left_s=spent_s / (number + 1) * (reading.passes - number - 1),
                )
            )
    if tally.is_empty:
        raise RecordingUnreadableError(
            f"the text has fewer sequences than the {world} ranks; start fewer or add text"
        )
    recording = tally.recording(naming=Naming(), model=loaded.name, workload=reading.workload)
    return replace(recording, num_decoder_layers=loaded.num_layers)


def joined(recordings: Sequence[Recording]) -> Recording:
    """The recordings of all ranks, which took the same passes, as one."""
    first = recordings[0]
    if len(recordings) == 1:
        # A single source says no more than the counts do.
        return replace(first, source_SLE=None)
    between, tokens = (
        [getattr(each, name) for each in recordings] for name in ("transition_MEE", "token_LTK")
    )
    return replace(
        first,
        count_PLE=np.sum([each.count_PLE for each in recordings], axis=0),
        source_SLE=np.stack([each.count_LE for each in recordings]),
        transition_MEE=None if between[0] is None else np.sum(between, axis=0),
        token_LTK=None if tokens[0] is None else np.concatenate(tokens, axis=1),
    )


def _passes(
    loaded: Loaded, reading: CaptureInput, *, rank: int, world: int
) -> Iterator[list[list[int]]]:
    """This rank's sequences of each pass; every rank has equally many passes."""
    rows: list[list[int]] = []
    done = 0
    for row in sequences(reading.texts, encode=loaded.encode, length=reading.tokens):
        rows.append(row)
        if len(rows) == reading.sequences * world:
            yield rows[rank * reading.sequences : (rank + 1) * reading.sequences]
            rows, done = [], done + 1
            if done == reading.passes:
                return
    each = len(rows) // world
    if done == 0 and each:
        yield rows[rank * each : (rank + 1) * each]
