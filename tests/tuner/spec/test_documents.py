import json
import os
import re
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.expect import refused
from tuner.errors import SpecError
from tuner.spec.documents import Documents, LengthFile, TooLong, documents_of_law, histogram
from tuner.spec.length_files import READERS, lengths_csv, read_documents
from tuner.spec.serving.lengths import LengthKind, LengthLaw, mean_tokens

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6]


def of(*tokens: int) -> Documents:
    return histogram(np.array(tokens), np.ones(len(tokens)))


def pairs(documents: Documents) -> list[tuple[int, float]]:
    return list(zip(documents.tokens_K.tolist(), documents.count_K.tolist(), strict=True))


def index(lengths: list[int], first: list[int]) -> bytes:
    """Megatron's index of sequences, whose documents begin at `first`."""
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(first) + 1)
    marks = np.array([*first, len(lengths)], dtype="<i8").tobytes()
    return head + np.array(lengths, dtype="<i4").tobytes() + bytes(8 * len(lengths)) + marks


def write(folder: Path) -> dict[str, LengthFile]:
    """The same documents in every format."""
    ids = pa.table({"input_ids": [[7] * n for n in LENGTHS], "label": LENGTHS})
    pq.write_table(ids, folder / "ids.parquet")
    pq.write_table(pa.table({"tokens": LENGTHS}), folder / "tokens.parquet")
    for name, open_as in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with open_as(str(folder / name), ids.schema) as writer:
            writer.write_table(ids, max_chunksize=3)
    (folder / "counted.csv").write_text("tokens,count\n1,2\n\n3,1\n4,1\n5,1\n9,1\n2,1\n6,1\n")
    (folder / "bare.csv").write_text("".join(f"{n}\n" for n in LENGTHS))
    (folder / "named.csv").write_text("id,size\n" + "".join(f"0,{n}\n" for n in LENGTHS))
    lines = [{"input_ids": [0] * n} if n % 2 else {"tokens": n} for n in LENGTHS]
    (folder / "ids.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "megatron.idx").write_bytes(
        index([3, 1, 4, 1, 5, 4, 5, 2, 6], [0, 1, 2, 3, 4, 5, 7, 8])
    )
    files = {path.name: LengthFile(path=path) for path in folder.iterdir()}
    return files | {"named.csv": LengthFile(path=folder / "named.csv", column="size")}


def test_every_format_says_the_same(tmp_path: Path) -> None:
    files = write(tmp_path)
    assert len(files) == 9
    expected = pairs(of(*LENGTHS))
    assert {name: pairs(read_documents(file)) for name, file in files.items()} == dict.fromkeys(
        files, expected
    )
    copy = tmp_path / "copy.csv"
    copy.write_text(lengths_csv(of(*LENGTHS)))
    assert pairs(read_documents(LengthFile(path=copy))) == expected


def test_text_is_counted_by_its_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.jsonl").write_text('{"text": "a b c"}\n{"text": "d"}\n')
    stated = LengthFile(path=tmp_path / "text.jsonl", tokenizer=tmp_path / "tokenizer.json")
    assert pairs(read_documents(stated)) == [(1, 1.0), (3, 1.0)]


def test_a_bad_file_is_refused_in_one_line(tmp_path: Path) -> None:
    wrong: dict[str, tuple[str, str | bytes]] = {
        "empty": ("a.csv", "tokens,count\n"),
        "nothing": ("b.csv", ""),
        "zero": ("c.csv", "tokens\n5\n0\n"),
        "negative": ("d.csv", "tokens\n-3\n"),
        "fractional": ("e.csv", "tokens\n2.5\n"),
        "no number": ("f.csv", "tokens\nnan\n"),
        "count 0": ("g.csv", "tokens,count\n5,0\n"),
        "too long": ("h.csv", "tokens\n99999999\n"),
        "no column": ("i.csv", "size,count\n5,1\n"),
        "no end": ("j.txt", "5\n"),
        "no JSON": ("k.jsonl", "{\n"),
        "no object": ("l.jsonl", "[1]\n"),
        "no ids": ("m.jsonl", '{"input_ids": []}\n'),
        "a truth": ("n.jsonl", '{"tokens": true}\n'),
        "fractional JSON": ("o.jsonl", '{"tokens": 2.5}\n'),
        "text alone": ("p.jsonl", '{"text": "a"}\n'),
        "no index": ("q.idx", b"MMIDIDY" + bytes(40)),
        "cut index": ("r.idx", index([5, 5], [0, 1])[:-9]),
        "empty document": ("s.idx", index([5, 5], [0, 0])),
        "no Arrow": ("t.arrow", b"ARROW1, it says"),
        "no Parquet": ("u.parquet", "PAR1"),
        "absent": ("absent.csv", b""),
    }
    for what, (name, content) in wrong.items():
        path = tmp_path / name
        if name != "absent.csv":
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(SpecError) as refusal:
            read_documents(LengthFile(path=path))
        text = str(refusal.value)
        assert "\n" not in text, what
        assert re.match(r"goal\.sequence_lengths: .*: .+", text), (what, text)


def test_documents_that_are_too_long_are_cut_split_dropped_or_refused() -> None:
    documents = of(1, 4, 5, 9, 9)
    assert pairs(documents.limited(4, TooLong.CUT)) == [(1, 1.0), (4, 4.0)]
    # 5 = 4 + 1 and twice 9 = 4 + 4 + 1.
    assert pairs(documents.limited(4, TooLong.SPLIT)) == [(1, 4.0), (4, 6.0)]
    assert pairs(documents.limited(4, TooLong.DROP)) == [(1, 1.0), (4, 1.0)]
    with pytest.raises(SpecError, match="3 documents are longer than sequence_length 4"):
        documents.limited(4, TooLong.REFUSE)
    with pytest.raises(SpecError, match="drop leaves no document"):
        of(9).limited(4, TooLong.DROP)
    assert documents.limited(9, TooLong.REFUSE).tokens == documents.tokens == 28.0
    assert documents.effective_tokens == (1 + 16 + 25 + 81 + 81) / 28


def test_a_law_becomes_documents_of_its_mean() -> None:
    for law in (
        LengthLaw(kind=LengthKind.LOGNORMAL, mean=700, cv=1.5),
        LengthLaw(kind=LengthKind.UNIFORM, low=3, high=900),
        LengthLaw(kind=LengthKind.EMPIRICAL, values=(5, 50, 500), weights=(1.0, 2.0, 3.0)),
        LengthLaw(kind=LengthKind.FIXED, mean=64),
    ):
        documents = documents_of_law(law)
        assert documents.tokens / documents.count == pytest.approx(mean_tokens(law), rel=0.01), law


def test_drawn_documents_have_the_shares_of_the_histogram() -> None:
    documents = histogram(np.array([10, 20, 40]), np.array([100.0, 200.0, 700.0]))
    drawn = documents.drawn(1000, np.random.default_rng(3))
    counted = np.unique(drawn, return_counts=True)[1]
    assert np.abs(counted - [100, 200, 700]).max() <= 1


def test_pipes_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    for suffix in READERS:
        pipe = tmp_path / f"lengths{suffix}"
        os.mkfifo(pipe)
        with refused(SpecError, "cannot be read"):
            read_documents(LengthFile(path=pipe))
