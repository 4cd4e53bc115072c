"""Mutations of an input: its bytes, its values, its keys, the file itself, a text argument."""

import contextlib
import copy
import csv
import io
import json
import math
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

LONG: Final = "x" * 20_000
STRINGS: Final = (
    "",
    " ",
    "0",
    "-1",
    "nan",
    "inf",
    "1e999",
    "9" * 400,
    "1GiB",
    "-3GiB",
    "1e30TiB",
    "0s",
    "true",
    "null",
    "../../../etc/passwd",
    "/dev/zero",
    "a\0b",
    "a\nb\r\nc",
    "\x1b[31mred\x1b[0m\x07",
    "\u202eright\u2066\u200f",
    "\ud800",
    "é中文🙂",
    "%s%n{0}{x!r:>{y}}",
    "$(touch owned) `touch owned` ; touch owned",
    "!!python/object/apply:os.system ['touch owned']",
    "2024-13-45",
    "9" * 5000,
    "0x" + "f" * 5000,
    "1:" + "59:" * 3000 + "59",
    "a." * 50_000 + "a = 1",
    "for\n" * 40_000,
    "&a [*a, *a]",
    "{" * 400,
    "[" * 3_000,
    LONG,
)
NUMBERS: Final = (
    0,
    -1,
    1,
    2,
    3,
    7,
    0.5,
    -0.0,
    10**6,
    2**31,
    2**53 + 1,
    2**63,
    10**30,
    -(10**30),
    10**400,
    1e308,
    5e-324,
    math.nan,
    math.inf,
    -math.inf,
)
OTHERS: Final[tuple[Any, ...]] = (True, False, None, [], {}, [[]], {"": 0}, [None], [1, "a", None])


def a_value(rng: random.Random) -> Any:
    """Return a value that few fields accept."""
    return rng.choice((rng.choice(NUMBERS), rng.choice(STRINGS), rng.choice(OTHERS), _deep(rng)))


def _deep(rng: random.Random) -> Any:
    value: Any = 1
    for _ in range(rng.choice((3, 40, 200))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def text_argument(rng: random.Random, text: str) -> str:
    """Mutate a command-line argument; without null characters, which arguments cannot have."""
    way = rng.randrange(6)
    at = rng.randrange(len(text) + 1)
    nasty = str(rng.choice((*STRINGS, *NUMBERS)))
    spoilt = (
        nasty,
        text[:at] + nasty[:200] + text[at:],
        text[:at],
        text[:at] + text[at:] * rng.choice((2, 50)),
        _numbers_replaced(rng, text),
        "".join(rng.sample(text, len(text))),
    )[way]
    return (
        spoilt.replace("\0", "")
        .encode("utf-8", "surrogateescape")
        .decode("utf-8", "surrogateescape")
        if not _has_lone_surrogate(spoilt)
        else spoilt.replace("\ud800", "?").replace("\0", "")
    )


def _has_lone_surrogate(text: str) -> bool:
    return any("\ud800" <= sign <= "\udfff" for sign in text)


def _numbers_replaced(rng: random.Random, text: str) -> str:
    words = text.split(" ")
    at = [place for place, word in enumerate(words) if any(map(str.isdigit, word))]
    if at:
        words[rng.choice(at)] = str(rng.choice(NUMBERS))
    return " ".join(words)


def spoil(rng: random.Random, file: Path) -> str:
    """Corrupt a file in place, and return a description."""
    ways: list[Callable[[random.Random, Path], str]] = [_spoil_bytes, _spoil_bytes]
    structured = _STRUCTURED.get(file.suffix)
    if structured is not None:
        ways += [structured] * 6
    if rng.random() < 0.12:
        ways = [_replace_file]
    return rng.choice(ways)(rng, file)


def _replace_file(rng: random.Random, file: Path) -> str:
    if file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink()
    way = rng.choice(
        ("empty", "folder", "pipe", "loop", "zero", "full", "dangling", "absent", "hole")
    )
    targets = {"loop": file.name, "zero": "/dev/zero", "full": "/dev/full", "dangling": "nowhere"}
    if way in targets:
        file.symlink_to(targets[way])
    elif way == "empty":
        file.touch()
    elif way == "folder":
        file.mkdir()
    elif way == "pipe":
        os.mkfifo(file)
    elif way == "hole":
        with file.open("wb") as stream:
            stream.truncate(2**40)
    return f"the file is {way}"


def _spoil_bytes(rng: random.Random, file: Path) -> str:
    data = bytearray(file.read_bytes())
    way = rng.choice(("flip", "cut", "repeat", "insert", "drop", "nest", "garbage"))
    at = rng.randrange(len(data) + 1)
    if way == "flip":
        for _ in range(rng.choice((1, 3, 30))):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
    elif way == "cut":
        del data[at:]
    elif way == "repeat":
        data[at:at] = bytes(data[at : at + rng.choice((1, 40, 4000))]) * rng.choice((1, 20, 500))
    elif way == "insert":
        data[at:at] = rng.choice(STRINGS).encode("utf-8", "surrogatepass")
    elif way == "drop":
        del data[at : at + rng.choice((1, 10, 200))]
    elif way == "nest":
        data[at:at] = rng.choice((b"[", b"{", b'{"a":', b"(")) * rng.choice((10, 100_000))
    else:
        data[:] = rng.randbytes(rng.choice((1, 100, 10_000)))
    file.write_bytes(bytes(data[: 2**24]))
    return f"bytes: {way} at {at}"


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of everything within a value."""
    inside: list[tuple[Any, ...]] = [path] if path else []
    keys: Any = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        inside += places(value[key], (*path, key))
    return inside


def spoilt_value(rng: random.Random, value: Any) -> tuple[Any, str]:
    """Return a copy of JSON-like values with one corrupted, and a description."""
    values = copy.deepcopy(value)
    inside = places(values)
    if not inside:
        return a_value(rng), "the whole"
    # Of a long list one entry says as much as another.
    path = rng.choice(inside if rng.random() < 0.5 else [one for one in inside if len(one) < 4])
    parent = _at(values, path[:-1])
    key = path[-1]
    way = rng.choice(("value", "value", "number", "remove", "insert", "rename", "swap", "bool"))
    if way == "remove":
        del parent[key]
    elif way == "insert" and isinstance(parent, dict):
        parent[rng.choice(STRINGS)] = a_value(rng)
    elif way == "insert":
        parent[key:key] = [a_value(rng)] * rng.choice((1, 1000))
    elif way == "rename" and isinstance(parent, dict):
        parent[str(key)[:-1] + rng.choice(("", "x", "\u202e", "\x1b[2J"))] = parent.pop(key)
    elif way == "swap":
        parent[key] = copy.deepcopy(_at(values, rng.choice(inside)))
    elif way == "bool" and isinstance(parent[key], int):
        parent[key] = rng.choice((True, False))
    elif way == "number" and isinstance(parent[key], int | float):
        parent[key] = rng.choice(NUMBERS)
    else:
        parent[key] = a_value(rng)
    return values, f"{way} at {'.'.join(map(str, path))[:80]}"


def _at(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def _spoil_json(rng: random.Random, file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        lines = text.splitlines()
        at = rng.randrange(len(lines))
        value, how = spoilt_value(rng, json.loads(lines[at]))
        lines[at] = json.dumps(value)
        file.write_text("\n".join(lines) + "\n")
        return f"line {at}: {how}"
    value, how = spoilt_value(rng, json.loads(text))
    written = json.dumps(value, indent=1)
    if rng.random() < 0.1:
        key = rng.choice([line for line in written.splitlines() if '": ' in line] or ['"a": 1'])
        written = written.replace(
            "{", "{" + key.rstrip(",[{") + ("1" if key[-1] in "[{" else "") + ",", 1
        )
        how = f"twice: {key[:60]}"
    file.write_text(written)
    return how


def _spoil_database(rng: random.Random, file: Path) -> str:
    """Corrupt a cell of a table of Optuna's: its value, its row, its whole column."""
    with closing(sqlite3.connect(file)) as database, database:
        listed = database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        table = rng.choice(sorted(name for (name,) in listed))
        columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
        column, value = rng.choice(columns), a_value(rng)
        if column == "value_json" and rng.random() < 0.8:
            held = rng.choice(
                database.execute(f"SELECT {column} FROM {table}").fetchall() or [("1",)]
            )
            value = spoilt_value(rng, json.loads(held[0]))[0]
        if not isinstance(value, str | float | None):
            value = json.dumps(value)
        where = rng.choice(("", " WHERE rowid = 1", " WHERE rowid = 2"))
        spoilt = f"UPDATE OR IGNORE {table} SET {column} = :value{where}"
        how = rng.choice((*[spoilt] * 4, f"DELETE FROM {table}{where}", f"DROP TABLE {table}"))
        # Numbers beyond SQLite's and lone surrogates are refused by it.
        with contextlib.suppress(sqlite3.Error, OverflowError, UnicodeError):
            database.execute(how, {"value": value})
    return f"{how}: {value!r}"[:200]


def _spoil_yaml(rng: random.Random, file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if rng.random() < 0.15:
        bomb = "a: &a [x, x]\n" + "".join(
            f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n"
            for n in range(12)
        )
        square = f"a: &a [{','.join('1' * 9000)}]\nb: [{','.join(['*a'] * 9000)}]"
        extra = rng.choice(
            (
                bomb,
                square,
                text.splitlines()[-1],
                "goal: {kind: train}",
                "? [1, 2]\n: 3",
                "<<: {a: 1}",
            )
        )
        file.write_text(f"{text}\n{extra}\n")
        return f"appended {extra[:40]!r}"
    values = list(yaml.safe_load_all(text))
    at = rng.randrange(len(values))
    values[at], how = spoilt_value(rng, values[at])
    written = yaml.safe_dump_all(values, sort_keys=False, allow_unicode=rng.random() < 0.5)
    file.write_text(written, encoding="utf-8", errors="surrogatepass")
    return how


def _spoil_csv(rng: random.Random, file: Path) -> str:
    rows = list(csv.reader(io.StringIO(file.read_text(encoding="utf-8"))))
    row = rng.randrange(len(rows))
    way = rng.choice(("cell", "cell", "cell", "header", "short", "long", "twice", "many"))
    if way == "header":
        row = 0
    cell = rng.randrange(max(1, len(rows[row])))
    if way in ("cell", "header") and rows[row]:
        rows[row][cell] = str(a_value(rng)).replace("\0", "")
    elif way == "short":
        rows[row] = rows[row][:cell]
    elif way == "long":
        rows[row] = rows[row] * 3
    elif way == "twice":
        rows = [[*each, *each[cell : cell + 1]] for each in rows]
    else:
        rows += [rows[row]] * rng.choice((1, 300))
    stream = io.StringIO()
    csv.writer(stream).writerows(rows)
    file.write_text(stream.getvalue(), encoding="utf-8", errors="surrogatepass")
    return f"{way} at row {row}, column {cell}"


def _spoil_parquet(rng: random.Random, file: Path) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(file)
    at = rng.randrange(table.num_columns)
    name = table.column_names[at]
    way = rng.choice(
        ("drop", "twice", "rename", "nulls", "values", "values", "type", "rows", "none", "bomb")
    )
    if way == "drop":
        table = table.remove_column(at)
    elif way == "twice":
        table = table.append_column(name, table.column(at))
    elif way == "rename":
        names = list(table.column_names)
        names[at] = rng.choice((names[at - 1], "\x1b[2J", "\u202e", "", LONG))
        table = table.rename_columns(names)
    elif way == "nulls":
        table = table.set_column(at, name, pa.nulls(table.num_rows, table.schema.field(at).type))
    elif way == "values":
        table = table.set_column(at, name, _other_values(rng, table.column(at)))
    elif way == "type":
        table = table.set_column(at, name, pa.array(["x"] * table.num_rows))
    elif way == "bomb":
        table = table.set_column(at, name, _long_column(rng, table.num_rows))
    elif way == "rows":
        table = pa.concat_tables([table] * rng.choice((2, 30)))
    else:
        table = table.slice(0, rng.choice((0, 1)))
    pq.write_table(table, file)
    return f"{way} in column {name}"


def _long_column(rng: random.Random, rows: int) -> Any:
    """Return a column that takes no room in a file and gigabytes in memory."""
    import pyarrow as pa

    if rows and rng.random() < 0.5:
        ends = [0] * rows + [10_000_000]
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(np.zeros(10_000_000)))
    text = pa.array(["x" * (10**9 // max(rows, 100))])
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), text)


def _other_values(rng: random.Random, column: Any) -> Any:
    import pyarrow as pa

    values = column.to_pylist()
    if not values:
        return column
    at = rng.randrange(len(values))
    kinds: Mapping[type, tuple[Any, ...]] = {
        int: (0, -1, 2**62, -(2**63)),
        str: STRINGS[:-4],
        list: ([], [-1.0], [math.nan], [math.inf], [0.0], [1e-300], [1e300], [1.0] * 5000),
        float: (math.nan, -1.0, math.inf, 0.0),
    }
    choices = kinds.get(type(values[at]))
    if choices is not None:
        values[at] = rng.choice([one for one in choices if one != "\ud800"])
    try:
        return pa.array(values, type=column.type)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return column


def _spoil_text(rng: random.Random, file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines() or [""]
    at = rng.randrange(len(lines))
    way = rng.choice(("numbers", "numbers", "text", "twice", "drop", "swap", "many", "space"))
    if way == "space":
        start = rng.randrange(len(lines[at]) + 1)
        run = rng.choice(" \t\n") * rng.choice((70, 150_000))
        lines[at] = lines[at][:start] + run + lines[at][start:]
    elif way == "numbers":
        lines[at] = _numbers_replaced(rng, lines[at])
    elif way == "text":
        lines[at] = text_argument(rng, lines[at])
    elif way == "drop":
        del lines[at]
    elif way == "swap":
        other = rng.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines[at:at] = [lines[at]] * rng.choice((1, 20_000))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")
    return f"{way} at line {at}"


def _spoil_array(rng: random.Random, file: Path) -> str:
    arrays = (
        np.zeros((0, 8)),
        np.full((3, 4, 8), np.nan),
        np.full((4, 8), -1),
        np.full((4, 8), 2**62),
        np.full((4, 8), 0.5),
        np.ones((4, 8), dtype=complex),
        np.ones((4, 8), dtype=bool),
        np.full((4, 8), "x"),
        np.ones((4, 8), dtype="M8[s]"),
        np.ones((1,) * 32),
        np.array(7),
        np.ones((4, 8), dtype=[("a", "i4"), ("b", "i4")]),
        np.zeros((300, 9000), dtype=np.int8),
        np.asfortranarray(np.ones((4, 8), dtype=">i2")),
    )
    at = rng.randrange(len(arrays))
    np.save(file, arrays[at])
    return f"array {at}"


def _spoil_tensor(rng: random.Random, file: Path) -> str:
    import torch

    few = torch.ones(1, dtype=torch.int64)
    deep: Any = few
    for _ in range(rng.choice((5, 400))):
        deep = [deep]
    wide: Any = [few]
    for _ in range(40):
        wide = [wide, wide]
    values = (
        few.as_strided((1, 4096, 131_072), (0, 0, 0)),
        few.float().as_strided((2**20, 2**12), (0, 0)),
        {"records": [few], "last_physical_to_logical_map": few},
        {"logical_count": few.as_strided((2**30,), (0,))},
        {"records": [{}], "last_physical_to_logical_map": few.as_strided((4, 2**28), (0, 0))},
        torch.full((3, 4, 8), float("nan")),
        torch.full((4, 8), -(2**63)),
        torch.ones((4, 8), dtype=torch.bfloat16),
        torch.eye(4).to_sparse(),
        torch.ones((4, 8), dtype=torch.complex64),
        torch.empty((4, 8), device="meta"),
        torch.ones((0, 8)),
        {few: 1},
        "text",
        deep,
        wide,
        {"weight": few, "a": few},
    )
    at = rng.randrange(len(values))
    torch.save(values[at], file, _use_new_zipfile_serialization=rng.random() < 0.7)
    return f"tensor {at}"


_STRUCTURED: Final[Mapping[str, Callable[[random.Random, Path], str]]] = {
    ".json": _spoil_json,
    ".jsonl": _spoil_json,
    ".db": _spoil_database,
    ".yaml": _spoil_yaml,
    ".csv": _spoil_csv,
    ".parquet": _spoil_parquet,
    ".sh": _spoil_text,
    ".toml": _spoil_text,
    ".txt": _spoil_text,
    ".npy": _spoil_array,
    ".pt": _spoil_tensor,
}
