"""Training steps on vectors on a GPU: QuAR against zuko's MAF and NSF, at equal numbers of parameters.

Ten transforms each, batch 4096, float32, D = 6 and 64. A step is ``zero_grad``, loss, ``backward`` and
``Adam(fused=True)``; as it is written (eager), the same captured as one CUDA graph, and with the log-density under
``torch.compile``: all three alike for all models. Under ``torch.compile`` QuAR runs its readable form. What is run one
way at one D was timed in turns; a ratio is to MAF run the same way, round by round.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Spread, interleave, load, ratio, save, start, table
from benchmarks.vectors_cpu import Contestant, matched, parameters, quar, training_step, zuko_flow
from quarflow.bench import free, milliseconds
from quarflow.data.toy import mixture_of_gaussians

REFERENCE = "zuko MAF"
WAYS = ("eager", "CUDA graph", "compiled")  # the last takes minutes to compile


@dataclass(frozen=True)
class Settings:
    """Coordinates with the layers of QuAR's blocks, and sizes of the run."""

    hidden: tuple[tuple[int, tuple[int, ...]], ...] = ((6, (32, 32)), (64, (8, 8)))
    transforms: int = 10
    batch: int = 4096
    rounds: int = 30


def contestants(d: int, hidden: tuple[int, ...], transforms: int, device: torch.device) -> dict[str, Contestant]:
    """QuAR with ``hidden``, and the others with as many parameters."""
    ours = quar(d, transforms, hidden)
    target, _ = parameters(ours.module)
    found = {"QuAR": ours}
    for kind in ("MAF", "NSF"):
        found[f"zuko {kind}"] = matched(partial(zuko_flow, kind, d, transforms=transforms), target)
    for each in found.values():
        each.module.to(device).train()
    return found


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """``step`` as one CUDA graph, after some that warm up; itself where there is no GPU."""
    if not torch.cuda.is_available():
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def prepared(way: str, contestant: Contestant, x: Tensor) -> Callable[[], None]:
    """A training step that is ready to be timed."""
    if way == "compiled":
        contestant = dataclasses.replace(contestant, log_prob=torch.compile(contestant.log_prob))
    step = training_step(contestant, [x], capturable=way == "CUDA graph" and x.is_cuda)
    step = captured(step) if way == "CUDA graph" else step
    for _ in range(3):
        step()
    return step


def measure(d: int, way: str, models: dict[str, Contestant], x: Tensor, rounds: int) -> Iterator[dict[str, Any]]:
    """A row of results for each contestant at ``d`` coordinates, run that way."""
    steps, failed = {}, {}
    for name, model in models.items():
        try:
            steps[name] = prepared(way, model, x)
        except RuntimeError as error:  # of the compiler, or of a capture
            failed[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    times = interleave({k: lambda s=s: milliseconds(s, 1, x.device)[0] for k, s in steps.items()}, rounds)
    for name, model in models.items():
        row = {"d": d, "way": way, "model": name, "parameters": parameters(model.module)[0], "hidden": model.hidden}
        if name in failed:
            yield row | {"failed": failed[name]}
            continue
        beside = ratio(times[name], times[REFERENCE]) if REFERENCE in times else None
        yield row | {"milliseconds": Spread.of(times[name]), "ratio": beside}


def show(result: dict[str, Any]) -> str:
    """The table of a result, in Markdown."""
    body = [
        [r["d"], r["way"], r["model"], r["parameters"], *(_cell(r, key) for key in ("milliseconds", "ratio"))]
        for r in result["rows"]
    ]
    batch = result["settings"]["batch"]
    return table(["d", "step", "model", "parameters", f"training step, batch {batch}: ms", "/ MAF"], body)


def _cell(row: dict[str, Any], key: str) -> object:
    return "failed" if "failed" in row else "-" if row[key] is None else row[key]


def extend(parser: argparse.ArgumentParser) -> None:
    """The option of this benchmark."""
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="only these (default: all)")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, saves and prints."""
    options = start(__doc__, arguments, extend)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings, ways = Settings(), options.ways or WAYS
    if options.quick:
        settings, ways = Settings(((3, (8, 8)),), 2, 16, 3), options.ways or WAYS[:2]
    elif device.type != "cuda":
        raise SystemExit("vectors: expected a GPU that torch sees; got none. --quick --out FOLDER runs anywhere.")
    rows: list[dict[str, Any]] = []
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    for way in ways:
        for d, hidden in settings.hidden:
            torch.manual_seed(0)
            x = mixture_of_gaussians(d).sample(settings.batch)
            x = ((x - x.mean(0)) / x.std(0)).float().to(device)
            models = contestants(d, hidden, settings.transforms, device)
            models["QuAR"].module.initialise(x)  # type: ignore[operator]
            rows += measure(d, way, models, x, settings.rounds)
            # After each group: a run that is cut loses little.
            path = save(options, "vectors", vars(settings), rows, ["zuko"], gpu=gpu, hardware=gpu or "no GPU")
            print(way, d, "done", flush=True)
            del models
            free(device)
    print(show(load(path)))


if __name__ == "__main__":
    main()
