"""Images on a GPU: a training step and a test pass of the paper's CIFAR-10 flow and of its residual twin.

The shape is 3x32x32, three scales of 16 blocks. A training step is everything: noise, forward and backward pass,
clipping, Adam, the moving average of the weights; where it says so as one CUDA graph. A test pass is ``log_prob`` of a
batch. Times are medians between device events; memory is the most that torch had allocated, model and data included.
The images are made up (smooth, with noise): neither time nor memory depends on them. The difference in bits/dim is that
of the same images and noise after these steps of training. The residual flow has the same network, without masks.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import quarflow as qf
from benchmarks.harness import Spread, load, ratio, save, start, table
from quarflow.graph_training import WARM_UP, GraphTrainer
from quarflow.precision import products
from quarflow.training import Options, Rows, Trainer
from quarflow.transforms.residual import recomputing

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
    rounds: int = 20
    slow_rounds: int = 4  # of the residual flow


# precision, CUDA graph, recomputation
TRAIN = {
    "QuAR": [("bf16", True, False), ("bf16", True, True), ("bf16", False, False), ("tf32", True, False)],
    "residual": [("bf16", False, False), ("tf32", False, False)],
}
TEST = ("bf16", "tf32", "full")


def images(shape: tuple[int, int, int], n: int, device: torch.device) -> Tensor:
    """Smooth uint8 images with noise.

    >>> images((1, 4, 4), 2, torch.device("cpu")).shape
    torch.Size([2, 1, 4, 4])
    """
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(n, shape[0], max(1, shape[1] // 4), max(1, shape[2] // 4), generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, shape[1:], mode="bilinear")
    return (220 * smooth + 35 * torch.rand(smooth.shape, generator=generator)).to(torch.uint8).to(device)


def milliseconds(call: Callable[[], object], rounds: int, device: torch.device) -> list[float]:
    """Of each call: between events on the device's stream, or by the host's clock where there is none."""
    found = []
    for _ in range(rounds):
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            last.synchronize()
            found.append(first.elapsed_time(last))
        else:
            begun = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - begun))
    return found


def gibibytes(device: torch.device) -> float | None:
    """The most that torch had allocated since the last call; none is known for the host."""
    if device.type != "cuda":
        return None
    most = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return most


def build(model: str, size: Size, x: Tensor) -> qf.Flow:
    """A flow of that kind, initialised from images."""
    torch.manual_seed(0)
    make = getattr(qf.models, MODELS[model])
    flow: qf.Flow = make(size.shape, blocks=size.blocks, hidden=size.hidden, activation="elu").to(x.device)
    return flow.initialise(Rows(x[:64]).values(flow.base.anchor))


def measure(size: Size, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row of results for each way to train and to test each flow."""
    x = images(size.shape, 4 * max(size.train_batch, size.test_batch), device)
    for model in MODELS:
        rounds = size.rounds if model == "QuAR" else size.slow_rounds
        flow = build(model, size, x)
        for precision, graph, recompute in TRAIN[model]:
            gibibytes(device)
            options = Options(10_000, None, size.train_batch, 1e-4, clip=1.0, ema=0.999, precision=precision)
            trainer = (GraphTrainer if graph else Trainer)(flow.train(), Rows(x), None, options)
            with recomputing(flow) if recompute else products("full", device), trainer.queued():
                milliseconds(trainer.advance, WARM_UP + 3 if graph else 3, device)
                times = milliseconds(trainer.advance, rounds, device)
            how = [precision, *(["graph"] if graph else []), *(["recomputation"] if recompute else [])]
            yield row("train", model, ", ".join(how), size.train_batch, times, device)
            trainer.finish()
            del trainer
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        flow.eval()
        test, bits = x[: size.test_batch], {}
        for precision in TEST[::-1]:
            v = Rows(test).values(flow.base.anchor)
            gibibytes(device)
            with torch.no_grad(), products(precision, device):
                milliseconds(lambda: flow(v), 2, device)  # noqa: B023 (called at once)
                times = milliseconds(lambda: flow(v), rounds, device)  # noqa: B023
            found = row("test", model, precision, size.test_batch, times, device)
            bits[precision] = qf.bits_per_dim(flow, test, batch_size=size.test_batch, precision=precision).bpd
            yield found | {"bits_from_full": bits[precision] - bits["full"]}


def row(what: str, model: str, how: str, batch: int, times: Sequence[float], device: torch.device) -> dict[str, Any]:
    """One result."""
    measured = {"milliseconds": Spread.of(times), "gibibytes": gibibytes(device)}
    return {"what": what, "model": model, "how": how, "batch": batch, **measured}


def ratios(rows: Sequence[dict[str, Any]]) -> list[list[object]]:
    """The residual flow's fastest time over QuAR's, beside the paper's."""
    best = {
        (what, model): min(r["milliseconds"].median for r in rows if (r["what"], r["model"]) == (what, model))
        for what in PAPER
        for model in MODELS
    }
    found = []
    for what, paper in PAPER.items():
        ours = ratio([best[what, "residual"]], [best[what, "QuAR"]]).median
        found.append([what, best[what, "QuAR"], best[what, "residual"], ours, paper])
    return found


def show(result: dict[str, Any]) -> str:
    """The tables of a result, in Markdown."""
    keys = ("what", "model", "how", "batch", "milliseconds", "gibibytes", "bits_from_full")
    body = [["-" if r.get(key) is None else r[key] for key in keys] for r in result["rows"]]
    head = ["", "model", "how", "batch", "ms", "peak GiB", "bits/dim less that in float32"]
    second = table(["fastest", "QuAR, ms", "residual, ms", "ratio", "the paper's"], ratios(result["rows"]))
    return f"{table(head, body)}\n\n{second}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, saves and prints."""
    options = start(__doc__, arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = Size()
    if options.quick:
        size = Size((1, 8, 8), (1, 1), 8, 4, 8, 2, 2)
    elif device.type != "cuda":
        raise SystemExit("images_gpu: expected a GPU that torch sees; got none. --quick --out FOLDER runs anywhere.")
    rows, gpu = [], torch.cuda.get_device_name(device) if device.type == "cuda" else None
    for found in measure(size, device):
        rows.append(found)
        path = save(options, "images_gpu", vars(size), rows, gpu=gpu)  # after each: a run that is cut loses little
        print(found["what"], found["model"], found["how"], found["milliseconds"].text(), "ms", flush=True)
    print(show(load(path)))


if __name__ == "__main__":
    main()
