"""The paper's table of costs on a GPU: training and testing QuAR and its residual twin, and drawing samples.

The shape is that of CIFAR-10, 3x32x32, three scales of 16 blocks, and for one row that of MNIST. A training step is
everything: noise, forward and backward pass, clipping, Adam, the moving average of the weights; where it says so as one
CUDA graph. A test pass is ``log_prob`` of a batch. Sampling is the inverse to the same tolerance by Newton and by
Banach, of the same noise, for the weights after these steps of training, or those of ``--trained FILE``. Times are
medians between device events; memory is the most that torch had allocated, model and data included. The images are made
up (smooth, with noise): neither time nor memory of a step depends on them. The difference in bits/dim is that of the
same images and noise. The residual flow has the same network, without masks. Beside a time of QuAR stand the shares of
it that products and memory would take at the rates measured in the same run, as in docs/speed.md.

In the summary a time is that of the fastest way, and the memory beside it is of the same; ``fp32`` is tf32, whose
products the kernels make of three, and whose difference in bits/dim stands beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import quarflow as qf
from benchmarks.harness import Spread, load, number, ratio, save, start, table
from quarflow.bench import Rates, Work, free, images, milliseconds, observe, peak_memory, training
from quarflow.precision import products
from quarflow.solvers import Banach, Newton, NotConverged, Solver
from quarflow.training import Rows
from quarflow.transforms import Residual

MODELS = {"QuAR": "quar_image", "residual": "residual_image"}
PAPER = {"train": 2.3, "test": 28.6}  # table 2: the residual flow's time over QuAR's


@dataclass(frozen=True)
class Size:
    """Of what is measured."""

    shape: tuple[int, int, int] = (3, 32, 32)
    blocks: tuple[int, ...] = (16, 16, 16)
    hidden: int = 576
    train_batch: int = 96
    test_batch: int = 256
    samples: int = 64
    tolerance: float = 1e-5
    rounds: int = 20
    slow_rounds: int = 10  # of the residual flow
    mnist_shape: tuple[int, int, int] = (1, 28, 28)
    mnist_hidden: int = 512
    mnist_batch: int = 128


# precision, CUDA graph, recomputation
TRAIN = {
    "QuAR": [("bf16", True, False), ("bf16", True, True), ("bf16", False, False), ("tf32", True, False)],
    "residual": [("bf16", False, False), ("tf32", False, False)],
    "QuAR, MNIST": [("bf16", True, False)],
}
TEST = {"QuAR": ("full", "tf32", "bf16"), "residual": ("tf32", "bf16")}
SOLVERS = {"newton": Newton, "banach": Banach}


def build(model: str, shape: tuple[int, int, int], size: Size, device: torch.device) -> qf.Flow:
    """A flow of that kind for images of ``shape``, initialised from images."""
    torch.manual_seed(0)
    hidden = size.hidden if shape == size.shape else size.mnist_hidden
    make = getattr(qf.models, MODELS[model])
    flow: qf.Flow = make(shape, blocks=size.blocks, hidden=hidden, activation="elu").to(device)
    return flow.initialise(Rows(images(shape, 64, device)).values(flow.base.anchor))


def measure(size: Size, device: torch.device, trained: Path | None = None) -> Iterator[dict[str, Any]]:
    """A row of results for each way to train and to test each flow, and to sample."""
    rates = {precision: Rates.of(device, precision, device.type != "cuda") for precision in TEST["QuAR"]}
    flow = build("QuAR", size.mnist_shape, size, device)
    work = Work.of(flow, size.mnist_batch)
    for found in train("QuAR, MNIST", flow, size.mnist_batch, size.rounds, device):
        yield with_floors(found, work, rates)
    for model in MODELS:
        rounds = size.rounds if model == "QuAR" else size.slow_rounds
        flow = build(model, size.shape, size, device)
        # The residual flow's work is random, and larger than anyone waits for on a CPU.
        work = [Work.of(flow, n) for n in (size.train_batch, size.test_batch)] if model == "QuAR" else [None, None]
        for found in train(model, flow, size.train_batch, rounds, device):
            yield with_floors(found, work[0], rates)
        for found in test(model, flow.eval(), size.test_batch, rounds, device):
            yield with_floors(found, work[1], rates)
        if model == "QuAR":
            yield from sample(flow if trained is None else qf.load(trained).to(device).eval(), size, device)
        del flow
        free(device)


def with_floors(found: dict[str, Any], work: Work | None, rates: dict[str, Rates]) -> dict[str, Any]:
    """A row with the shares of its time that products and memory would take at the rates of its precision."""
    if work is None:
        return found
    return found | work.floors(found, rates[found["how"].partition(",")[0]], found["what"] == "train")


def train(
    model: str, flow: qf.Flow, batch: int, rounds: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Training steps."""
    channels, height, width = flow.event_shape
    data = Rows(images((channels, height, width), 4 * batch, device))
    for precision, graph, recompute in TRAIN[model]:
        with training(flow, data, batch, precision, graph, recompute) as advance:
            found = observe(advance, rounds, device, warm_up=9 if graph else 2)
        how = [precision, *(["graph"] if graph else []), *(["recomputation"] if recompute else [])]
        yield row("train", model, ", ".join(how), batch, found, device)
        del advance
        free(device)


def test(model: str, flow: qf.Flow, batch: int, rounds: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Log-densities of a batch, and how far their bits/dim are from those in float32."""
    channels, height, width = flow.event_shape
    x = images((channels, height, width), batch, device)
    v = Rows(x).values(flow.base.anchor)
    full = qf.bits_per_dim(flow, x, batch_size=batch).bpd
    for precision in TEST[model]:
        with torch.no_grad(), products(precision, device):
            found = observe(lambda: flow(v), rounds, device)
        found["bits_from_full"] = qf.bits_per_dim(flow, x, batch_size=batch, precision=precision).bpd - full
        yield row("test", model, precision, batch, found, device)


@contextmanager
def solved_by(flow: qf.Flow, solver: Solver) -> Iterator[None]:
    """Within it, every residual block has this solver."""
    blocks = [m for m in flow.modules() if isinstance(m, Residual)]
    before = [block.solver for block in blocks]
    try:
        for block in blocks:
            block.solver = solver
        yield
    finally:
        for block, kept in zip(blocks, before, strict=True):
            block.solver = kept


def sample(flow: qf.Flow, size: Size, device: torch.device) -> Iterator[dict[str, Any]]:
    """Draws from the same noise, by each solver to the same tolerance."""
    drawn = {}

    def draw(name: str) -> None:
        torch.manual_seed(1)
        drawn[name] = flow.sample(size.samples)

    for name, solver in SOLVERS.items():
        with solved_by(flow, solver(tolerance=size.tolerance)):
            try:
                held = peak_memory(lambda: draw(name), device)  # noqa: B023 (called at once)
                times = milliseconds(lambda: draw(name), 10 if name == "newton" else 3, device)  # noqa: B023
            except NotConverged as error:
                yield {"what": "sample", "model": "QuAR", "how": name, "batch": size.samples, "failed": str(error)}
                continue
        measured = {"milliseconds": Spread.of(times), "mebibytes": held / 2**20}
        found = row("sample", "QuAR", name, size.samples, measured, device)
        if len(drawn) > 1:
            found["apart"] = (drawn["newton"] - drawn[name]).abs().max().item()
        yield found


def row(
    what: str, model: str, how: str, batch: int, found: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """One result."""
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return {"what": what, "model": model, "how": how, "batch": batch, **found, "gibibytes": memory}


def best(rows: Sequence[dict[str, Any]], what: str, model: str, how: str = "") -> dict[str, Any]:
    """The fastest of these rows; empty if there is none."""
    of = [r for r in rows if (r["what"], r["model"]) == (what, model) and how in ("", r["how"])]
    found = [r for r in of if "failed" not in r]
    return min(found, key=lambda r: r["milliseconds"].median, default={})


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """The figures by name; None for what was not measured."""

    def ms(what: str, model: str, how: str = "") -> float | None:
        found = best(rows, what, model, how)
        return found["milliseconds"].median if found else None

    return {
        "train_ms": ms("train", "QuAR"),
        "train_gib": best(rows, "train", "QuAR").get("gibibytes"),
        "train_recomputation_ms": ms("train", "QuAR", "bf16, graph, recomputation"),
        "train_recomputation_gib": best(rows, "train", "QuAR", "bf16, graph, recomputation").get("gibibytes"),
        "test_ms_bf16": ms("test", "QuAR", "bf16"),
        "test_ms_fp32": ms("test", "QuAR", "tf32"),
        "residual_train_ms": ms("train", "residual"),
        "residual_test_ms": ms("test", "residual"),
        "sample_ms": ms("sample", "QuAR", "newton"),
        "sample_banach_ms": ms("sample", "QuAR", "banach"),
        "mnist_train_ms": ms("train", "QuAR, MNIST"),
    }


def ratios(result: dict[str, Any]) -> list[list[object]]:
    """The residual flow's fastest time over QuAR's, beside the paper's; Banach's over Newton's."""
    pairs = [
        ("training step", "train_ms", "residual_train_ms", PAPER["train"]),
        ("test", "test_ms_bf16", "residual_test_ms", PAPER["test"]),
        ("sampling, by Banach instead", "sample_ms", "sample_banach_ms", "-"),
    ]
    return [
        [name, result[ours], result[other], ratio([result[other]], [result[ours]]).median, paper]
        for name, ours, other, paper in pairs
        if result[ours] is not None and result[other] is not None
    ]


def show(result: dict[str, Any]) -> str:
    """The tables of a result, in Markdown."""
    keys = ("what", "model", "how", "batch", "milliseconds", "gibibytes", "bits_from_full")
    shares = ("share_of_products", "share_of_memory")
    body = [
        [
            *("-" if r.get(key) is None else r[key] for key in keys),
            *(f"{r[key]:.1%}" if key in r else "-" for key in shares),
        ]
        for r in result["rows"]
    ]
    head = ["", "model", "how", "batch", "ms", "peak GiB", "bits/dim less that in float32"]
    head += ["products at the measured rate", "memory at the measured rate"]
    second = table(["fastest", "QuAR, ms", "the other, ms", "ratio", "the paper's"], ratios(result))
    return f"{table(head, body)}\n\n{second}"


def extend(parser: argparse.ArgumentParser) -> None:
    """The option of this benchmark."""
    parser.add_argument("--trained", type=Path, help="a QuAR flow of images, saved, to sample from")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, saves and prints."""
    options = start(__doc__, arguments, extend)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = Size()
    if options.quick:
        size = Size((2, 4, 4), (1,), 8, 2, 4, 2, 1e-5, 2, 2, (1, 4, 4), 4, 2)
    elif device.type != "cuda":
        raise SystemExit("table2: expected a GPU that torch sees; got none. --quick --out FOLDER runs anywhere.")
    rows: list[dict[str, Any]] = []
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    for found in measure(size, device, options.trained):
        rows.append(found)
        # After each: a run that is cut loses little.
        path = save(options, "table2", vars(size), rows, gpu=gpu, hardware=gpu or "no GPU", **summary(rows))
        time = found["failed"] if "failed" in found else f"{number(found['milliseconds'].median)} ms"
        print(found["what"], found["model"], found["how"], time, flush=True)
    print(show(load(path)))


if __name__ == "__main__":
    main()
