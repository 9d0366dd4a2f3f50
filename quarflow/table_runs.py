"""What ``quarflow fit``, ``score`` and ``sample`` do with files of tables."""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quarflow.checkpoint import save
from quarflow.runs import value
from quarflow.table_files import batches, take, to_table, writing
from quarflow.table_flow import TableFlow, fit_table
from quarflow.tables import Table, check_present, some

ROWS = 32_768  # of a part that is drawn


def fit(
    data: str,
    out: Path,
    *,
    rows: int = 1_000_000,
    columns: Mapping[str, str] | None = None,
    bounds: Mapping[str, str] | None = None,
    model_options: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """From a file of a table to a model; gives what it found, for JSON."""
    if not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"out: the folder {out.absolute().parent} does not exist. Create it first.")
    kinds = {name: value(kind) for name, kind in (columns or {}).items()}
    edges = {name: _edges(name, text) for name, text in (bounds or {}).items()}
    with _bar("read") as show:
        kept, count = take(data, rows, options.get("seed", 0), show)
    table = to_table(kept, kinds=kinds)
    settings = {name: value(text) for name, text in (model_options or {}).items()}
    settings = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}
    used = {name: values for name, values in table.items() if kinds.get(name) != "drop"}
    check_present(used, 1, table if options.get("missing") == "marginal" else ())
    flow, history = fit_table(table, columns=kinds, bounds=edges, model_options=settings, **options)
    save(flow, out)
    return {
        "rows": len(kept),
        "rows_in_file": count,
        "columns": {c.name: c.in_words for c in flow.schema.columns},
        "order": flow.schema.order if flow.in_one_order else None,
        "steps": history.steps[-1] if history.steps else 0,
        "stopped": history.stopped,
        "validation_nats": history.best_validation,
        "seconds": history.seconds,
        "model": str(out),
    }


def score(
    flow: TableFlow,
    data: str,
    out: str | None,
    workers: int | None = None,
    columns: Sequence[str] | None = None,
    given: Sequence[str] = (),
) -> dict[str, Any]:
    """The log-density of each row of a file, into the column ``log_prob`` of another, on all cores; a summary.

    With ``columns``, of these alone, and given others: see `TableFlow.score`. At any time a few parts of the file are
    in memory, in the order of the file.
    """
    workers = workers or len(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    total, squares, rows, impossible = 0.0, 0.0, 0, 0
    first: float | None = None  # what sums are taken about, so that few digits are lost

    asked = {*columns, *given, *(c.name for c in flow.schema.given)} if columns is not None else None

    def part(batch: Any, first_row: int) -> np.ndarray:
        if asked is not None:
            batch = batch.select([name for name in batch.schema.names if name in asked])
        return flow.score(to_table(batch, flow.schema, first_row=first_row), first_row, columns=columns, given=given)

    def parts(show: Callable[[float], None]) -> Iterator[np.ndarray]:
        waiting: deque[Future[np.ndarray]] = deque()
        # Parts side by side, each in one thread, are faster than one part in all threads.
        torch.set_num_threads(1)
        pool = ThreadPoolExecutor(workers)
        try:
            row = 1
            for batch in batches(data, show):
                waiting.append(pool.submit(part, batch, row))
                row += len(batch)
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)

    flow.eval()
    with _bar("score") as show, _writing(out) as write:
        for nats in parts(show):
            write({"log_prob": nats})
            possible = nats[np.isfinite(nats)]
            if first is None and len(possible):
                first = float(possible[0])
            rows, impossible = rows + len(nats), impossible + len(nats) - len(possible)
            total += float((possible - (first or 0.0)).sum())
            squares += float(((possible - (first or 0.0)) ** 2).sum())
    # JSON has no infinity: with impossible rows the mean is that, said as null.
    mean: float | None = None
    error: float | None = None
    if not impossible:
        mean = total / rows + (first or 0.0)
        variance = max(0.0, squares - total**2 / rows) / max(1, rows - 1)
        error = math.sqrt(variance / rows)
    return {"rows": rows, "nats": mean, "standard_error": error, "impossible": impossible}


def sample(flow: TableFlow, out: str, n: int, given: Mapping[str, str], seed: int) -> None:
    """``n`` rows into a file, in parts."""
    order = flow.schema.order
    names = {c.name: c for c in flow.schema.columns if c.given or c.name in order}
    needed = [c.name for c in flow.schema.given]
    if not set(needed) <= set(given) <= set(names):
        more = f", and of any first ones of {some(order)}" if flow.in_one_order or flow.schema.labels else ""
        raise ValueError(f"given: expected values of {some(needed)}{more}; got those of {some(given)}.")
    known: Table = {}
    for name, text in given.items():
        found: Any = text if names[name].kind == "category" and isinstance(names[name].values[0], str) else value(text)
        known[name] = np.array([found], dtype=object if isinstance(found, str | bool) else float)
    device = flow.base.anchor.device
    generator = torch.Generator(device).manual_seed(seed)
    with _bar("sample") as show, _writing(out) as write:
        for start in range(0, n, ROWS):
            write(flow.draw(min(ROWS, n - start), known or None, generator))
            show(min(n, start + ROWS) / n)


def report(flow: TableFlow, data: str, out: Path, **options: Any) -> dict[str, Any]:
    """The page of `quarflow.report`, with a bar; gives its numbers, for JSON."""
    from quarflow.report import write

    with _bar("report") as show:
        return write(flow, data, out, show=show, **options)


@contextmanager
def _writing(out: str | None) -> Iterator[Callable[[Table], None]]:
    if out is None:
        yield lambda part: None
        return
    with writing(out) as write:
        yield write


@contextmanager
def _bar(what: str) -> Iterator[Callable[[float], None]]:
    """Something to tell the part that is done: a bar, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn(f"[bold]{what}"), BarColumn(bar_width=24), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda done: bar.update(task, completed=done)


def _edges(name: str, text: str) -> object:
    if text == "found":
        return text
    low, colon, high = text.partition(":")
    try:
        if not colon:
            raise ValueError("no colon")
        return tuple(float(edge) if edge.strip() else None for edge in (low, high))
    except ValueError as error:
        raise ValueError(f"bounds: expected {name}=LOW:HIGH, or {name}=found; got {text!r}.") from error
