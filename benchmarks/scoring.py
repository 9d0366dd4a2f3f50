"""Rows scored per second: QuAR as `FlowDensity` takes it by default for a table, against zuko's neural spline flow.

The spline flow has zuko's default layers, or widths that give it as many parameters as QuAR has. One CPU thread, all of
them, and a GPU if there is one, in float32 and in float64, in which `FlowDensity` scores. Nothing is trained, as no
time depends on the weights; QuAR has seen the rows, for its quantiles.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import quarflow as qf
from benchmarks.harness import Spread, interleave, load, ratio, save, start, table, timed
from benchmarks.vectors_cpu import matched, zuko_flow
from quarflow.data.toy import mixture_of_gaussians
from quarflow.table_flow import defaults
from quarflow.tables import Column, Schema

OURS = "QuAR"
WIDTH = 64  # of zuko's layers, by default
DOUBLE = ", float64"


def default_quar(x: Tensor, rows: int) -> nn.Module:
    """The flow that a table with so many rows and the columns of ``x`` gets."""
    found = defaults(rows, x.shape[1])
    schema = Schema(tuple(Column(f"x{i}", "number") for i in range(x.shape[1])))
    return qf.models.table(schema, **found["table"], **found["model"]).initialise(x).eval()


def contestants(x: Tensor, rows: int) -> dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]]:
    """Modules, in float32 and in float64, and how they score rows."""
    ours, d = default_quar(x, rows), x.shape[1]
    size = sum(p.numel() for p in ours.parameters())
    single: dict[str, tuple[nn.Module, Any]] = {
        OURS: (ours, lambda module, x: module.log_prob(x)),
        "zuko NSF, as many parameters": (matched(partial(zuko_flow, "NSF", d), size).module, _zuko),
        "zuko NSF": (zuko_flow("NSF", d, WIDTH).module, _zuko),
    }
    double = {name + DOUBLE: (copy.deepcopy(module).double(), score) for name, (module, score) in single.items()}
    return single | double


def _zuko(module: Any, x: Tensor) -> Tensor:
    found: Tensor = module().log_prob(x)
    return found


def measure(d: int, batch: int, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """A row of results for each contestant, with the ratio of rows per second: QuAR's in its dtype over its own."""
    torch.manual_seed(0)
    x = mixture_of_gaussians(d).sample(batch).float().to(device)
    models = contestants(x.cpu(), rows=100_000)

    def call(module: nn.Module, score: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[], float]:
        module.to(device)
        rows = x.to(next(module.parameters()).dtype)

        @torch.no_grad()
        def once() -> None:
            score(module, rows)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return timed(once)

    seconds = interleave({name: call(*model) for name, model in models.items()}, rounds)
    rows = []
    for name, (module, _) in models.items():
        row = {"d": d, "device": device.type, "threads": torch.get_num_threads(), "batch": batch, "model": name}
        row["parameters"] = sum(p.numel() for p in module.parameters())
        row["rows_per_second"] = Spread.of([batch / s for s in seconds[name]])
        ours = OURS + DOUBLE * name.endswith(DOUBLE)
        rows.append(row | {"ratio": ratio(seconds[name], seconds[ours])})
    return rows


def show(result: dict[str, Any]) -> str:
    """The table of a result, in Markdown."""
    body = [
        [
            r["d"],
            "GPU" if r["device"] == "cuda" else f"CPU, {r['threads']} thread{'s' * (r['threads'] > 1)}",
            r["model"],
            r["parameters"],
            r["rows_per_second"].text(1e-3),
            r["ratio"],
        ]
        for r in result["rows"]
    ]
    return table(["d", "on", "model", "parameters", "thousand rows per second", "QuAR is faster by"], body)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, saves and prints."""
    options = start(__doc__, arguments)
    settings = {"d": [6, 20], "batch": 2048, "gpu_batch": 65_536, "rounds": 30}
    if options.quick:
        settings = {"d": [3], "batch": 32, "gpu_batch": 32, "rounds": 2}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    places = [(torch.device("cpu"), threads, settings["batch"]) for threads in sorted({1, cores})]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if gpu is not None:
        places.append((torch.device("cuda"), 1, settings["gpu_batch"]))
    rows: list[dict[str, Any]] = []
    for device, threads, batch in places:
        torch.set_num_threads(threads)
        for d in settings["d"]:  # type: ignore[attr-defined]
            rows += measure(d, batch, device, settings["rounds"])  # type: ignore[arg-type]
    torch.set_num_threads(1)
    path = save(options, "scoring", settings, rows, ["zuko"], gpu=gpu)
    print(show(load(path)))


if __name__ == "__main__":
    main()
