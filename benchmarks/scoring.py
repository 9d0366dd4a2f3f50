"""Rows scored per second: QuAR as `FlowDensity` takes it by default for a table, against zuko's neural spline flow.

The spline flow has zuko's default layers, or widths that give it as many parameters as QuAR has. One CPU thread, all of
them, and a GPU if there is one. All are in float32; `FlowDensity` scores in float64, which is a row of its own. Nothing
is trained, as no time depends on the weights; QuAR has seen the rows, for its quantiles.
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


def default_quar(x: Tensor, rows: int) -> nn.Module:
    """The flow that a table with so many rows and the columns of ``x`` gets."""
    found = defaults(rows, x.shape[1])
    schema = Schema(tuple(Column(f"x{i}", "number") for i in range(x.shape[1])))
    return qf.models.table(schema, **found["table"], **found["model"]).initialise(x).eval()


def contestants(x: Tensor, rows: int) -> dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Modules, and how each scores rows."""
    ours = default_quar(x, rows)
    double = copy.deepcopy(ours).double()
    d, size = x.shape[1], sum(p.numel() for p in ours.parameters())
    found = {OURS: (ours, ours.log_prob), f"{OURS}, float64": (double, lambda x: double.log_prob(x.double()))}
    equal, default = matched(partial(zuko_flow, "NSF", d), size), zuko_flow("NSF", d, WIDTH)
    for name, nsf in (("zuko NSF, as many parameters", equal), ("zuko NSF", default)):
        found[name] = nsf.module, nsf.log_prob
    return found


def measure(d: int, batch: int, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """A row of results for each contestant, with the ratio of rows per second: QuAR's over its own."""
    torch.manual_seed(0)
    x = mixture_of_gaussians(d).sample(batch).float().to(device)
    models = contestants(x.cpu(), rows=100_000)

    def call(module: nn.Module, log_prob: Callable[[Tensor], Tensor]) -> Callable[[], float]:
        module.to(device)

        @torch.no_grad()
        def once() -> None:
            log_prob(x)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return timed(once)

    seconds = interleave({name: call(*model) for name, model in models.items()}, rounds)
    rows = []
    for name, (module, _) in models.items():
        row = {"d": d, "device": device.type, "threads": torch.get_num_threads(), "batch": batch, "model": name}
        row["parameters"] = sum(p.numel() for p in module.parameters())
        row["rows_per_second"] = Spread.of([batch / s for s in seconds[name]])
        rows.append(row | {"ratio": ratio(seconds[name], seconds[OURS])})
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
    settings = {"d": [6, 20], "batch": 4096, "gpu_batch": 65_536, "rounds": 30}
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
