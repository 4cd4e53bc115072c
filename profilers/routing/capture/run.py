"""Record the routing of a model on text: what `moetune profile --suite routing` does.

A pass is `sequences` sequences of `tokens` tokens: the batch that a step of training or of prefill
would have. Files follow each other in the order in which they are named; their tokens are one
stream that is cut into sequences. Text is read a piece at a time, so a file may be larger than
memory; where a piece ends inside of a word, that word becomes other tokens. Sequences that no
longer fill a pass are dropped, unless there is no other.

Nothing is generated: the text is read once, as in prefill or training. Routing while decoding
differs in the text that the model writes itself.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

import numpy as np
import torch

from profilers.clock import HostClock
from profilers.errors import ModelUnreadableError, RecordingUnreadableError
from profilers.files import open_regular
from profilers.machine import fingerprint
from profilers.progress import Progress, ProgressEvent, silent
from profilers.records import ProfileHeader
from profilers.routing.capture.gates import gates_of, watched
from profilers.routing.capture.model import Loaded, load_model
from profilers.routing.overrides import Naming
from profilers.routing.recording import Recording
from profilers.routing.store import FOLDER, WORKLOAD, write_recording
from profilers.routing.tally import MOST_TOKENS, Tally
from profilers.store import holds_profile, write_header

PIECE: Final = 2**16
"""Characters that are made into tokens at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureInput:
    """Model and texts to run, and tokens and passes to read at once.

    Raises:
        ValueError: a size is not at least 1, or the name cannot be a folder's.
    """

    model: Path
    texts: tuple[Path, ...]
    workload: str
    tokens: int = 1024
    """Tokens of a sequence."""
    sequences: int = 4
    """Sequences of a pass."""
    passes: int = 256
    """Passes, at most."""

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


def capture(out: Path, reading: CaptureInput, *, progress: Progress = silent) -> Recording:
    """Record into `out`/routing/<workload>, beside the profile that `out` holds or now gets.

    Raises:
        ProfilerError: the model or a text cannot be read, or `out` cannot be written.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_model(reading.model, device=device)
    recording = record(loaded, reading, device=device, progress=progress)
    machine = fingerprint(device_kind=device.type, world=1, local_world=1)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    if not holds_profile(out):
        header = ProfileHeader(
            moetune_version=version("moetune"), created=created, machine=machine, tables={}
        )
        write_header(out, header)
    origin = (
        f"captured from {loaded.model_type}, {reading.sequences} sequences of {reading.tokens}"
        f" tokens a pass, on {machine.device}"
    )
    write_recording(out / FOLDER / reading.workload, recording, origin=origin, created=created)
    return recording


def record(
    loaded: Loaded, reading: CaptureInput, *, device: torch.device, progress: Progress = silent
) -> Recording:
    """Read the text with a loaded model.

    Raises:
        RecordingUnreadableError: a text cannot be read or has no token, or a sequence is too long
            for the model.
    """
    if reading.tokens > loaded.longest:
        raise RecordingUnreadableError(
            f"sequences of {reading.tokens} tokens; {loaded.name} takes {loaded.longest} at most"
        )
    gates = gates_of(loaded.decoder, model_type=loaded.model_type)
    tally = Tally(
        num_experts=loaded.num_experts,
        tokens_per_forward=max(1, MOST_TOKENS // reading.passes),
    )
    watch = HostClock()
    started_s = watch.now_s()
    with torch.inference_mode(), watched(gates, top_k=loaded.top_k) as chosen:
        for number, rows in enumerate(_passes(loaded, reading)):
            loaded.decoder(input_ids=torch.tensor(rows, device=device), use_cache=False)
            ids = {layer: ids.cpu().numpy().astype(np.int32) for layer, ids in chosen.items()}
            tally.add(ids, number=number)
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
        names = ", ".join(str(path) for path in reading.texts[:4])
        raise RecordingUnreadableError(f"{names}: no text in there; name files of UTF-8 text")
    return tally.recording(
        naming=Naming(),
        model=loaded.name,
        workload=reading.workload,
        num_decoder_layers=loaded.num_layers,
    )


def _passes(loaded: Loaded, reading: CaptureInput) -> Iterator[list[list[int]]]:
    """Yield the sequences of each pass: of equal length, the only one of a short text shorter."""
    tokens: list[int] = []
    size, done = reading.tokens * reading.sequences, 0
    for path in reading.texts:
        for piece in _pieces(path):
            tokens += loaded.encode(piece)
            if max(tokens, default=0) >= loaded.vocabulary:
                raise ModelUnreadableError(
                    f"{reading.model}: its tokenizer has token {max(tokens)}, its model only"
                    f" {loaded.vocabulary}"
                )
            while len(tokens) >= size and done < reading.passes:
                yield [tokens[at : at + reading.tokens] for at in range(0, size, reading.tokens)]
                tokens, done = tokens[size:], done + 1
            if done == reading.passes:
                return
    if tokens and not done:
        length = min(reading.tokens, len(tokens))
        whole = len(tokens) // length * length
        yield [tokens[at : at + length] for at in range(0, whole, length)]


def _pieces(path: Path) -> Iterator[str]:
    try:
        with open_regular(path) as file, io.TextIOWrapper(file, "utf-8") as stream:
            while piece := stream.read(PIECE):
                yield piece
    except UnicodeDecodeError as error:
        raise RecordingUnreadableError(
            f"{path} is no UTF-8 text: {error.reason} at byte {error.start}"
        ) from error
    except OSError as error:
        raise RecordingUnreadableError(f"{path}: {error.strerror}") from error
