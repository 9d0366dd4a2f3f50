"""Tables in files, CSV and Parquet, a part at a time: memory does not grow with the file.

CSV has a header, UTF-8 and a comma; a name ending in .gz is compressed; ``-`` is standard input or output, as CSV.
Needs pyarrow: ``pip install 'quarflow[tables]'``. Rows are counted from 1, the first behind the header.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quarflow.tables import Schema, Table, some

BLOCK = 1 << 20  # bytes of CSV that are read at a time


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("files of tables need pyarrow: pip install 'quarflow[tables]'") from error
    return pyarrow


def batches(path: str | os.PathLike[str], show: Callable[[float], None] = lambda done: None) -> Iterator[Any]:
    """The rows of a file as pyarrow record batches, those of CSV as text; ``show`` is told the part that is read."""
    name = os.fspath(path)
    parquet = name.endswith((".parquet", ".pq"))
    if name != "-" and not os.path.exists(name):
        raise FileNotFoundError(f"{name}: there is no such file.")
    if name != "-" and os.path.isdir(name):
        raise ValueError(f"{name}: expected a file; got a folder.")
    rows = 0
    for batch in (_parquet if parquet else _csv)(name, show):
        rows += len(batch)
        yield batch
    if not rows:
        raise ValueError(f"{name}: expected rows; got none.")


def _parquet(name: str, show: Callable[[float], None]) -> Iterator[Any]:
    arrow = _arrow()
    with arrow.parquet.ParquetFile(name) as file:
        done = 0
        for batch in file.iter_batches(batch_size=32_768):
            done += len(batch)
            show(done / file.metadata.num_rows)
            yield batch


def _csv(name: str, show: Callable[[float], None]) -> Iterator[Any]:
    arrow = _arrow()
    raw: Any = sys.stdin.buffer if name == "-" else open(name, "rb")  # noqa: SIM115 (closed below)
    size = os.path.getsize(name) if name != "-" else math.inf
    wrong: list[Any] = []

    def refuse(row: Any) -> str:
        wrong.append(row)
        return "error"

    try:
        file = io.BufferedReader(gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else raw, BLOCK)  # type: ignore[type-var, unused-ignore]
        header = file.readline()
        while header.count(b'"') % 2 and (more := file.readline()):
            header += more
        names = next(csv.reader([header.decode("utf-8-sig")]), [])
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{name}: expected a header of different names; got {some(names)}.")
        if all(_is_number(cell) for cell in names):
            raise ValueError(
                f"{name}: expected a header of names; got numbers, {some(names)}: a file without one? Put names in "
                "its first line, or before it: (echo a,b,c; cat FILE) | quarflow score MODEL -"
            )
        if not file.peek(1):
            return
        reader = arrow.csv.open_csv(
            file,
            # In one thread, which counts rows.
            arrow.csv.ReadOptions(use_threads=False, block_size=BLOCK, column_names=names),
            arrow.csv.ParseOptions(ignore_empty_lines=False, newlines_in_values=True, invalid_row_handler=refuse),
            arrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, arrow.string()),
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
        for batch in reader:
            show(raw.tell() / size if name != "-" else 0.0)
            yield batch
    except arrow.ArrowInvalid as error:
        if wrong:
            row = wrong[0]
            raise ValueError(
                f"{name}, row {row.number}: expected {row.expected_columns} values; got {row.actual_columns}, "
                f"{row.text:.80}. Mend or drop the row."
            ) from error
        raise ValueError(f"{name}: not a table in CSV: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: expected UTF-8; got {error}.") from error
    finally:
        if name != "-":
            raw.close()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class Drawn(NamedTuple):
    """Rows of a file, in its order: a pyarrow table, how many rows the file has, the number of each of these in the
    file, and its random key: any smaller draw of the same seed has those with the smallest keys."""

    rows: Any
    total: int
    numbers: np.ndarray
    keys: np.ndarray


def take(
    path: str | os.PathLike[str], most: int, seed: int = 0, show: Callable[[float], None] = lambda done: None
) -> tuple[Any, int]:
    """At most so many rows of a file as a pyarrow table, drawn without replacement if there are more; and how many
    there are."""
    return draw(path, most, seed, show)[:2]


def draw(
    path: str | os.PathLike[str], most: int, seed: int = 0, show: Callable[[float], None] = lambda done: None
) -> Drawn:
    """`take`, and which rows these are. A row is kept if its random key is among the smallest so far, so memory is that
    of the rows kept."""
    arrow, rng = _arrow(), np.random.default_rng(seed)
    kept: list[Any] = []
    marks: list[np.ndarray] = []  # numbers and keys
    pending = count = 0
    for batch in batches(path, show):
        kept.append(batch)
        marks.append(np.stack([np.arange(count + 1.0, count + len(batch) + 1.0), rng.random(len(batch))]))
        pending, count = pending + len(batch), count + len(batch)
        if pending > 2 * most:
            kept, marks = _smallest(arrow, kept, marks, most)
            pending = most
    if count > most:
        kept, marks = _smallest(arrow, kept, marks, most)
    numbers, keys = np.concatenate(marks, axis=1)
    return Drawn(arrow.Table.from_batches(kept), count, numbers.astype(int), keys)


def _smallest(
    arrow: Any, kept: list[Any], marks: list[np.ndarray], most: int
) -> tuple[list[Any], list[np.ndarray]]:
    joined = np.concatenate(marks, axis=1)
    chosen = np.sort(np.argpartition(joined[1], most - 1)[:most])
    return arrow.Table.from_batches(kept).take(chosen).combine_chunks().to_batches(), [joined[:, chosen]]


def to_table(
    rows: Any, schema: Schema | None = None, kinds: Mapping[str, object] | None = None, first_row: int = 1
) -> Table:
    """A `Table` of pyarrow rows. Text becomes numbers where ``schema`` has numbers, or where there is none and all of a
    column reads as numbers, unless ``kinds`` declares it a category."""
    wanted = {c.name: c for c in schema.columns} if schema else {}
    table = {}
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        if schema and (name not in wanted or wanted[name].kind == "drop"):
            continue
        if schema:
            found = wanted[name]
            found = wanted[found.source] if found.kind == "duplicate" else found
            numeric: bool | None = found.kind == "number" or isinstance(found.values[0], float)
            flags = not numeric and isinstance(found.values[0], bool)
        else:
            numeric, flags = (False if (kinds or {}).get(name) in ("category", "drop") else None), False
        table[name] = _values(name, column, numeric, flags, first_row)
    return table


def _values(name: str, column: Any, numeric: bool | None, flags: bool, first_row: int) -> np.ndarray:
    arrow = _arrow()
    if arrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    number = arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_decimal(kind)
    text = arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind)
    if number or arrow.types.is_null(kind):
        return np.array(column.cast(arrow.float64()).to_numpy(zero_copy_only=False))
    if text and numeric is not False:
        try:
            return np.array(column.cast(arrow.float64()).to_numpy(zero_copy_only=False))
        except arrow.ArrowInvalid:
            if (read := _numbers(name, column.to_pylist(), bool(numeric), first_row)) is not None:
                return read
    if not text and not arrow.types.is_boolean(kind):
        raise ValueError(f"column {name!r}: expected numbers, text or truth values; got {kind}. Convert or drop it.")
    out = np.empty(len(column), dtype=object)
    out[:] = column.to_pylist()
    if flags and text:
        out[:] = [{"true": True, "false": False}.get(v.lower(), v) if v is not None else None for v in out]
    return out


def _numbers(name: str, values: list[str | None], sure: bool, first_row: int) -> np.ndarray | None:
    """Text as numbers; None if it is none; an error where some of it is."""
    out, wrong = np.full(len(values), math.nan), []
    for i, value in enumerate(values):
        if value is not None:
            if _is_number(value):
                out[i] = float(value)
            else:
                wrong.append(i)
    present = sum(value is not None for value in values)
    if wrong and (sure or 2 * len(wrong) < present):
        raise ValueError(
            f"column {name!r}, row {first_row + wrong[0]}: expected a number, as in other rows; got "
            f"{values[wrong[0]]!r:.80}. Mend or drop the row, or declare the column a category when fitting."
        )
    return None if wrong else out


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[Callable[[Table], None]]:
    """What writes parts of a table, all with the same columns, to a file; it is there when all is written."""
    arrow, name = _arrow(), os.fspath(path)
    target = Path(os.path.realpath(name))
    if name != "-" and not target.parent.is_dir():
        raise FileNotFoundError(f"{name}: the folder {target.parent} does not exist. Create it first.")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    writer: Any = None
    sink: Any = None

    def write(part: Table) -> None:
        nonlocal writer, sink
        rows = arrow.table({k: arrow.array(v if v.dtype.kind == "f" else v.tolist()) for k, v in part.items()})
        if writer is None:
            sink = sys.stdout.buffer if name == "-" else open(temporary, "wb")  # noqa: SIM115 (closed below)
            if name.endswith((".parquet", ".pq")):
                writer = arrow.parquet.ParquetWriter(sink, rows.schema)
            else:
                sink = gzip.GzipFile(fileobj=sink, mode="wb", filename="", mtime=0) if name.endswith(".gz") else sink
                header = io.StringIO(newline="")
                csv.writer(header, lineterminator="\n").writerow(rows.schema.names)
                sink.write(header.getvalue().encode())
                options = arrow.csv.WriteOptions(include_header=False, quoting_style="needed")
                writer = arrow.csv.CSVWriter(sink, rows.schema, write_options=options)
        writer.write_table(rows)

    try:
        yield write
        if writer is not None:
            writer.close()
            sink.flush()
            if name != "-":
                _close(sink)
                os.replace(temporary, target)
    finally:
        if name != "-":
            if sink is not None:
                _close(sink)
            temporary.unlink(missing_ok=True)


def _close(sink: Any) -> None:
    inner = getattr(sink, "fileobj", None)
    sink.close()
    if inner is not None:
        inner.close()
