"""Make examples/routing/<domain>: train a small MoE, then record its routing.

    python tests/benchmarks/routing_recordings.py WORK [--minutes 12] [--model wide-moe [--long]]

The text is what Python and its packages bring along: the standard library's source, the documents
of packages (their descriptions and Markdown files, pydoc's topics), and the C and C++ headers of
Python, numpy and torch. The first half of each domain trains the model, the second half is
recorded: the router's choices are written as Megatron-LM traces them, and imported as users import
those. WORK keeps text, tokenizer and model; only the recordings go to examples/.

The model is Qwen3-MoE's architecture from transformers: 8 layers, 32 experts, 4 of a token, hidden
width 128, loss of balance 1e-3, byte-pair tokens. `wide-moe` has DeepSeek-V3's 256 experts, 8 of a
token, in 4 layers, and five times the loss of balance: with 1e-3 one expert draws 17 times the mean
and a seventh are idle, in published models one draws 6 to 8 times. Of its recordings,
examples/routing/wide-<domain>, only the counts are kept, since pairs of 256 experts take megabytes;
their text is mixed in pieces of a sequence, so that passes differ by chance and not by their files.

`--long` records twelve times as many tokens of the same trained model into
examples/routing/long-<domain>, from text of its own: files of the same kinds, and where documents
end the docstrings of packages. A paragraph that was trained on, or that stood in an earlier file,
is left out, as are licences and other text that is copied from file to file: so no paragraph is
both trained on and recorded, and none is recorded twice. `--domain` records one alone.

Neither is a good language model, and need not be:
what counts is that its router learned to tell domains apart, as the published skews of real models
show. Nothing here is random but by a fixed seed, yet another version of torch, or of the packages
whose text is read, makes another model.
"""

import argparse
import ast
import hashlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

EXAMPLES: Final = Path(__file__).parents[2] / "examples/routing"
DOMAINS: Final = ("python", "documents", "headers")
DOMAIN_BYTES: Final = 3_000_000
"""Most text, so that no domain dominates."""
FILE_BYTES: Final = 60_000
"""Most text of one file, for a mix of authors."""
LONG_BYTES: Final = 16_000_000
"""Most text that `--long` reads."""
LONG_BATCH: Final = 96
"""Sequences of its passes: 24,576 tokens, 32 ranks of 768."""
PARAGRAPH: Final = 40
"""Least characters of a paragraph that must not occur twice."""
PIECE: Final = 1000
"""Characters of a piece of mixed text, about a sequence."""
VOCABULARY: Final = 4096
SEQUENCE: Final = 256
BATCH: Final = 8
PASSES: Final = 128
SEED: Final = 7
CONFIG: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 1e-3,
    "output_router_logits": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One model and where its recordings go."""

    config: dict[str, Any]
    prefix: str
    """Of the recordings' names."""
    counts_only: bool
    is_mixed: bool
    """Pieces of text are shuffled before they are recorded: a pass holds many authors."""
    is_long: bool = False
    """Text of its own, more of it."""
    sequences: int = BATCH
    """Of a recorded pass."""


RECIPES: Final[dict[str, Recipe]] = {
    "small-moe": Recipe(config=CONFIG, prefix="", counts_only=False, is_mixed=False),
    "wide-moe": Recipe(
        config=CONFIG
        | {
            "num_hidden_layers": 4,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 32,
            "router_aux_loss_coef": 5e-3,
        },
        prefix="wide-",
        counts_only=True,
        is_mixed=True,
    ),
}


def main() -> None:
    """Train if WORK holds no model yet, then record."""
    options = argparse.ArgumentParser()
    options.add_argument("work", type=Path)
    options.add_argument("--minutes", type=float, default=12.0, help="processor time to train")
    options.add_argument("--model", choices=list(RECIPES), default="small-moe")
    options.add_argument("--long", action="store_true", help="record more text of the same model")
    options.add_argument("--domain", choices=DOMAINS, help="record this one alone")
    given = options.parse_args()
    work: Path = given.work
    recipe = RECIPES[given.model]
    if given.long:
        recipe = replace(recipe, prefix="long-", is_long=True, sequences=LONG_BATCH)
    for domain in DOMAINS:
        write_text(work / "text", domain)
    if not (work / given.model / "config.json").exists():
        train(work, given.model, seconds=given.minutes * 60.0)
    for domain in DOMAINS if given.domain is None else (given.domain,):
        record(work, given.model, recipe, domain)


def write_text(folder: Path, domain: str) -> None:
    """Two files of about equal size: to train on and to record."""
    half = {"train": folder / f"{domain}.train.txt", "record": folder / f"{domain}.record.txt"}
    if all(file.exists() for file in half.values()):
        return
    folder.mkdir(parents=True, exist_ok=True)
    pieces = list(_pieces(domain))
    # Every other file, so that both halves have text of every package.
    half["train"].write_text("\n".join(pieces[0::2]), encoding="utf-8")
    half["record"].write_text("\n".join(pieces[1::2]), encoding="utf-8")


def write_long_text(folder: Path, domain: str) -> Path:
    """Write paragraphs that occur in no text before them, the text that trained the model first."""
    target = folder / f"{domain}.long.txt"
    if target.exists():
        return target
    seen: set[bytes] = set()
    for trained in DOMAINS:
        list(_new(_paragraphs((folder / f"{trained}.train.txt").read_text("utf-8")), seen))
    kept: list[str] = []
    size = 0
    for file in _long_files(domain):
        text = "\n\n".join(_new(_paragraphs(_text_of(file, domain)), seen))[:FILE_BYTES]
        kept.append(text)
        size += len(text)
        if size > LONG_BYTES:
            break
    target.write_text("\n".join(kept), encoding="utf-8")
    return target


def _paragraphs(text: str) -> Iterator[str]:
    return (each.strip("\n") for each in re.split(r"\n\s*\n", text))


def _new(paragraphs: Iterable[str], seen: set[bytes]) -> Iterator[str]:
    """Yield what is not in `seen`, ignoring whitespace, and add it there."""
    for paragraph in paragraphs:
        words = " ".join(paragraph.split())
        digest = hashlib.sha256(words.encode("utf-8", errors="replace")).digest()[:12]
        if len(words) < PARAGRAPH:
            yield paragraph
        elif digest not in seen:
            seen.add(digest)
            yield paragraph


def _long_files(domain: str) -> Iterator[Path]:
    yield from _shuffled(_files(domain))
    if domain == "documents":
        yield from _shuffled(_packages().rglob("*.py"))


def _text_of(file: Path, domain: str) -> str:
    text = file.read_text(encoding="utf-8", errors="replace")
    if domain != "documents" or file.suffix != ".py" or file.name == "topics.py":
        return text
    return "\n\n".join(_docstrings(text))


def _docstrings(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and (said := ast.get_docstring(node)):
            yield said


def _packages() -> Path:
    """Where torch and its like are installed."""
    return Path(torch.__file__).parents[1]


def _pieces(domain: str) -> Iterator[str]:
    total = 0
    for file in _shuffled(_files(domain)):
        text = file.read_text(encoding="utf-8", errors="replace")[:FILE_BYTES]
        if total + len(text) > DOMAIN_BYTES:
            return
        total += len(text)
        yield text


def _files(domain: str) -> Iterable[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    packages = _packages()
    if domain == "python":
        return (each for each in library.rglob("*.py") if "site-packages" not in each.parts)
    if domain == "documents":
        written = (packages.rglob(name) for name in ("*.md", "*.rst", "METADATA", "LICENSE*"))
        return itertools.chain([library / "pydoc_data/topics.py"], *written)
    headers = (
        packages / "torch/include",
        packages / "numpy",
        Path(sysconfig.get_paths()["include"]),
    )
    return itertools.chain(*(folder.rglob("*.h") for folder in headers))


def _shuffled(files: Iterable[Path]) -> list[Path]:
    result = sorted(file for file in files if file.is_file())
    order = np.random.default_rng(SEED).permutation(len(result))
    return [result[index] for index in order]


def train(work: Path, name: str, *, seconds: float) -> None:
    """Train for some processor time; the model and its tokenizer go to WORK/<name>."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(SEED)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(work / f"text/{each}.train.txt") for each in DOMAINS], VOCABULARY)
    streams = [
        np.array(tokenizer.encode((work / f"text/{each}.train.txt").read_text("utf-8")).ids)
        for each in DOMAINS
    ]
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**RECIPES[name].config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    rng = np.random.default_rng(SEED)
    started_s, step = time.process_time(), 0
    while (spent_s := time.process_time() - started_s) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 50) * max(0.05, 1.0 - spent_s / seconds)
        # One domain a sequence, all domains in a step.
        rows = [_row(streams[index % len(streams)], rng) for index in range(BATCH + 1)]
        tokens = torch.from_numpy(np.stack(rows))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            sys.stderr.write(f"step {step} loss {loss.item():.3f} after {spent_s:.0f} s\n")
        step += 1
    model.save_pretrained(work / name)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer).save_pretrained(work / name)


def _row(stream: np.ndarray[Any, np.dtype[np.int64]], rng: np.random.Generator) -> Any:
    start = int(rng.integers(0, len(stream) - SEQUENCE))
    return stream[start : start + SEQUENCE].astype(np.int64)


def record(work: Path, name: str, recipe: Recipe, domain: str) -> None:
    """Trace a domain, and keep the imported recording only."""
    text = work / f"text/{domain}.record.txt"
    if recipe.is_long:
        text = write_long_text(work / "text", domain)
    if recipe.is_mixed:
        text = mixed(text)
    trace = work / "router_trace_rank0.jsonl"
    write_trace(trace, work / name, text, recipe)
    recorded = work / "recorded"
    command = [
        *(sys.executable, "-m", "tuner", "profile", "import", "megatron-trace", str(trace)),
        *("--experts", str(recipe.config["num_experts"]), "--model", name),
        *("--workload", recipe.prefix + domain, "--out", str(recorded)),
    ]
    subprocess.run(command, check=True)
    target = EXAMPLES / (recipe.prefix + domain)
    shutil.rmtree(target, ignore_errors=True)
    if recipe.counts_only:
        keep_counts(recorded, target)
    else:
        shutil.copytree(recorded, target)


def write_trace(trace: Path, folder: Path, text: Path, recipe: Recipe) -> None:
    """Read a text once, pass by pass, and write the choices of every token and layer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = AutoTokenizer.from_pretrained(folder)(text.read_text(encoding="utf-8"))["input_ids"]
    shape = (-1, recipe.sequences, SEQUENCE)
    size = recipe.sequences * SEQUENCE
    passes = torch.tensor(tokens[: len(tokens) // size * size])
    with trace.open("w", encoding="utf-8") as stream, torch.inference_mode():
        for step, rows in enumerate(passes.reshape(shape)[:PASSES]):
            logits = model(input_ids=rows, output_router_logits=True).router_logits
            for layer, each in enumerate(logits):
                chosen = each.topk(recipe.config["num_experts_per_tok"]).indices.tolist()
                record = {"step": step, "layer": layer, "rank": 0, "top_indices": chosen}
                stream.write(json.dumps(record) + "\n")


def mixed(text: Path) -> Path:
    """Write the pieces of a text in random order beside it, as requests of many users come."""
    content = text.read_text(encoding="utf-8")
    pieces = [content[at : at + PIECE] for at in range(0, len(content), PIECE)]
    order = np.random.default_rng(SEED).permutation(len(pieces))
    target = text.with_suffix(".mixed.txt")
    target.write_text("".join(pieces[index] for index in order), encoding="utf-8")
    return target


def keep_counts(recorded: Path, target: Path) -> None:
    """Copy a recording without its pairs and sampled tokens."""
    shutil.copytree(recorded, target)
    for table in ("tokens", "transitions"):
        (target / f"{table}.parquet").unlink()
    header = json.loads((target / "recording.json").read_text())
    header |= {"sampled_tokens": None, "transitions": None}
    (target / "recording.json").write_text(json.dumps(header, indent=2) + "\n")


if __name__ == "__main__":
    main()
