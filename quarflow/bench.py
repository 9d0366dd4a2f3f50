"""What a model costs on this machine: training step, ``log_prob`` and sampling, beside what the machine could do.

Time is the median of some calls after a warm-up, memory the most that torch held during a call beyond what was there
before it (weights, moments, data). Two floors stand beside a time:

    products    floating point operations of its matrix products / measured rate of a large product
    memory      bytes that have to be read and written / measured bandwidth of a large copy

Operations are those of the general form on a CPU, which leaves out most of what masks hold at zero, so a share of the
rate counts useful work alone. Bytes: ``log_prob`` reads weights and input once; a training step goes over the weights
`PASSES` times, and over what it held at its peak twice, to write and to read it.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from quarflow.checks import check_choice, check_count, is_out_of_memory
from quarflow.flow import Flow
from quarflow.kernels import forms
from quarflow.models import REGISTRY, from_dict
from quarflow.precision import PRECISIONS, products
from quarflow.training import Options, Rows, Trainer
from quarflow.transforms.residual import Residual, recomputing

CPU = torch.device("cpu")
# Forward and backward pass read the weights; the gradient is written; Adam reads it, weights and moments, and writes
# these; the average is read with the weights, and written.
PASSES = 2 + 1 + 4 + 3 + 3


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements.

    >>> Spread.of([3.0, 1.0, 2.0])
    Spread(median=2.0, low=1.5, high=2.5)
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value or more."""
        values = [*values, *values] if len(values) == 1 else values
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, scale: float = 1.0) -> str:
        """The median and, in brackets, the quartiles.

        >>> Spread(0.0021, 0.0020, 0.0023).text(1e3)
        '2.10 (2.00-2.30)'
        """
        return f"{number(scale * self.median)} ({number(scale * self.low)}-{number(scale * self.high)})"


def number(x: float) -> str:
    """Three significant digits, without an exponent where that is readable.

    >>> number(0.001234), number(12.345), number(1234.5), number(0.00001234)
    ('0.00123', '12.3', '1234', '1.2e-05')
    """
    if x and not 1e-3 <= abs(x) < 1e5:
        return f"{x:.1e}"
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:#.3g}"


def processor() -> str:
    """The model of the processor."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# Measuring one thing.


def milliseconds(call: Callable[[], object], rounds: int, device: torch.device) -> list[float]:
    """Of each call: between events on the device's stream, or by the host's clock where there is none.

    >>> len(milliseconds(lambda: None, 3, torch.device("cpu")))
    3
    """
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


def peak_memory(call: Callable[[], object], device: torch.device = CPU) -> int:
    """Bytes that torch held at most during ``call``, on a CPU a second one, beyond those that it held before.

    >>> peak_memory(lambda: torch.zeros(1000) + torch.zeros(1000))
    12000
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    call()  # what is allocated once is no part of a call
    # From the profiler's record of every allocation: exact, without noise.
    with _quiet(), torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["args"] for e in events if e.get("name") == "[memory]"), key=itemgetter("Ev Idx"))
    return max(accumulate(map(itemgetter("Bytes"), changes), initial=0))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the profiler, which is not Python, writes to stderr."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


@dataclass(frozen=True)
class Rates:
    """What a machine does at best: floating point operations and bytes, each in a second."""

    operations: float
    bytes: float

    @classmethod
    def of(cls, device: torch.device, precision: str = "full", quick: bool = False) -> Rates:
        """Of a product of large square matrices in that precision, and of a copy (read and written).

        >>> rates = Rates.of(torch.device("cpu"), quick=True)
        >>> rates.operations > 0 and rates.bytes > 0
        True
        """
        n, numel = (256, 2**18) if quick else (8192, 2**28) if device.type == "cuda" else (2048, 2**25)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        x, y = (torch.zeros(numel, device=device) for _ in range(2))
        out, rounds = torch.empty_like(a), 10
        # In bf16 the factors are so already.
        with torch.no_grad(), products("full" if precision == "bf16" else precision, device):
            product = milliseconds(lambda: torch.mm(a, b, out=out), rounds, device)
            copied = milliseconds(lambda: y.copy_(x), rounds, device)
        return cls(2 * n**3 / (1e-3 * min(product)), 8 * numel / (1e-3 * min(copied)))


class _Operations(TorchDispatchMode):
    """Counts by torch's formulas. (Its own mode follows modules too, and fails where they call ``autograd.grad``.)"""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func._overloadpacket):
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def operations(call: Callable[[int], object], batch: int) -> float:
    """Floating point operations of the matrix products of ``call(batch)``, from those of one row and of two.

    >>> weight = torch.ones(3, 5)
    >>> operations(lambda n: torch.ones(n, 3) @ weight, 10)
    300.0
    """

    def count(rows: int) -> int:
        with torch.random.fork_rng(devices=[]), _Operations() as counter:
            torch.manual_seed(0)  # estimates draw the same terms
            call(rows)
        return counter.total

    turned_off = os.environ.pop("QUARFLOW_KERNELS", None)  # what has to be done does not depend on the form
    try:
        one, two = count(1), count(2)
    finally:
        if turned_off is not None:
            os.environ["QUARFLOW_KERNELS"] = turned_off
    return float(one + (batch - 1) * (two - one))


# Measuring a flow.


def images(shape: tuple[int, int, int], n: int, device: torch.device) -> Tensor:
    """Smooth uint8 images with noise.

    >>> images((1, 4, 4), 2, torch.device("cpu")).shape
    torch.Size([2, 1, 4, 4])
    """
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(n, shape[0], max(1, shape[1] // 4), max(1, shape[2] // 4), generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, shape[1:], mode="bilinear")
    return (220 * smooth + 35 * torch.rand(smooth.shape, generator=generator)).to(torch.uint8).to(device)


def made_up(flow: Flow, n: int) -> Rows:
    """Data that ``flow`` takes, on its device: cost does not depend on them, but for sampling.

    >>> import quarflow as qf
    >>> made_up(qf.models.quar(features=2, context=1), 5).context.shape
    torch.Size([5, 1])
    """
    generator, anchor = torch.Generator().manual_seed(0), flow.base.anchor

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(anchor)

    context = normal(n, flow.context_features) if flow.context_features else None
    if len(flow.event_shape) == 3:
        channels, height, width = flow.event_shape
        return Rows(images((channels, height, width), n, anchor.device), context)
    return Rows(normal(n, *flow.event_shape), context)


def free(device: torch.device) -> None:
    """Gives memory back that nothing holds any more, that of CUDA graphs too.

    >>> free(torch.device("cpu"))
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def training(
    flow: Flow, data: Rows, batch: int, precision: str = "full", graph: bool = False, recompute: bool = False
) -> Iterator[Callable[[], object]]:
    """What takes a step: noise, forward and backward pass, clipping, Adam, the moving average of the weights.

    >>> import quarflow as qf
    >>> flow = qf.models.quar(features=2, blocks=1, hidden=(4,))
    >>> with training(flow, made_up(flow, 8), batch=4) as step:
    ...     step()
    """
    kind = Trainer
    if graph:
        from quarflow.graph_training import GraphTrainer as kind
    options = Options(10_000, None, batch, 1e-4, clip=1.0, ema=0.999, precision=precision)
    trainer = kind(flow.train(), data, None, options)
    with recomputing(flow) if recompute else nullcontext(), trainer.queued():
        trainer.advance()  # the optimiser makes its moments
        yield trainer.advance
    trainer.finish()


def observe(call: Callable[[], object], rounds: int, device: torch.device, warm_up: int = 2) -> dict[str, Any]:
    """Time, memory and forms of ``call``: ``milliseconds``, ``mebibytes`` and what `quarflow.kernels.forms` saw.

    >>> sorted(observe(lambda: None, 2, torch.device("cpu")))
    ['forms', 'mebibytes', 'milliseconds']
    """
    with forms() as seen:
        call()
    # The first calls, not later ones: a CUDA graph allocates when it is captured.
    held = peak_memory(lambda: [call() for _ in range(warm_up)], device)
    times = milliseconds(call, rounds, device)
    return {"milliseconds": Spread.of(times), "mebibytes": held / 2**20, "forms": dict(seen)}


@dataclass(frozen=True)
class Work:
    """What a training step and ``log_prob`` of a batch must do: operations of their products, and bytes."""

    step: float
    log_prob: float
    weights: int  # bytes
    batch: int  # bytes

    @classmethod
    def of(cls, flow: Flow, rows: int) -> Work:
        """Counted on a copy of ``flow``, on a CPU.

        >>> import quarflow as qf
        >>> work = Work.of(qf.models.quar(features=2, blocks=1, hidden=(4,)), 10)
        >>> 0 < work.log_prob < work.step, work.batch
        (True, 80)
        """
        few, twin = made_up(flow, 2), copy.deepcopy(flow).cpu().train()
        x, context = few.values(flow.base.anchor).cpu(), None if few.context is None else few.context.cpu()

        def forward(n: int) -> Tensor:
            return twin(x[:n], None if context is None else context[:n])

        step = operations(lambda n: forward(n).sum().backward(), rows)
        twin.eval()
        alone = operations(torch.no_grad()(forward), rows)
        weights = sum(p.numel() * p.element_size() for p in flow.parameters())
        return cls(step, alone, weights, rows * x[0].numel() * x.element_size())

    def floors(self, found: Mapping[str, Any], rates: Rates, training: bool) -> dict[str, float]:
        """Shares of the time that `observe` found: what products, and what memory, would take at these rates."""
        seconds = 1e-3 * found["milliseconds"].median
        work = self.step if training else self.log_prob
        moved = PASSES * self.weights + 2 * 2**20 * found["mebibytes"] if training else self.weights + self.batch
        return {
            "operations": work,
            "share_of_products": work / rates.operations / seconds,
            "share_of_memory": moved / rates.bytes / seconds,
        }


@dataclass(frozen=True)
class Bench:
    """What `measure` measures.

    >>> Bench("quar", features=2, options={"blocks": 1}).build(torch.device("cpu")).event_shape
    torch.Size([2])
    """

    model: str = "quar"
    features: int | None = None  # of models of vectors; None: 6
    shape: tuple[int, ...] | None = None  # (C, H, W), of models of images
    options: Mapping[str, Any] = field(default_factory=dict)  # of the model
    batch_size: int | None = None  # None: 512 vectors, or 64 images
    samples: int | None = None  # None: as many
    precision: str = "full"  # of products in training and log_prob; sampling keeps the flow's own
    rounds: int = 10
    quick: bool = False  # few rows and rounds: does it run at all?

    def __post_init__(self) -> None:
        check_choice("model", self.model, sorted(set(REGISTRY) - {"table"}))  # that one wants a table
        check_choice("precision", self.precision, PRECISIONS)
        check_count("rounds", self.rounds)
        if twice := {"model", "features", "shape"} & set(self.options):
            raise ValueError(f"options: expected {', '.join(sorted(twice))} on its own (--{min(twice)}), not in there.")
        of_images = "shape" in {f.name for f in dataclasses.fields(REGISTRY[self.model])}
        if of_images and (self.shape is None or self.features is not None):
            raise ValueError(f"shape: {self.model} is of images: expected their (C, H, W), such as 3,32,32, alone.")
        if not of_images and self.shape is not None:
            raise ValueError(f"shape: {self.model} is of vectors: expected features, a number, instead.")
        sizes = {"features": None if of_images else 6, "batch_size": 64 if of_images else 512}
        for name, size in sizes.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, size)
        if self.samples is None:
            object.__setattr__(self, "samples", self.batch_size)
        for name in ("features", "batch_size", "samples"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.quick:
            for name, size in {"batch_size": 4, "samples": 2, "rounds": 2}.items():
                object.__setattr__(self, name, min(size, getattr(self, name)))

    def build(self, device: torch.device) -> Flow:
        """The flow, initialised from made up data."""
        size = {"features": self.features} if self.shape is None else {"shape": self.shape}
        flow = from_dict({"model": self.model, **self.options, **size}).build().to(device)
        some = made_up(flow, 256 if self.shape is None else 32)
        return flow.initialise(some.values(flow.base.anchor), some.context)


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware and versions: all that a reader needs, nothing that names the machine."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"gpu": gpu, "cpu": processor(), "threads": torch.get_num_threads(), **versions}


def measure(bench: Bench, device: torch.device) -> Iterator[dict[str, Any]]:
    """First what is measured on what, then a row for each way to train, for ``log_prob`` and for samples.

    A row that cannot be had has ``failed``, the reason, and ``impossible``: whether no machine could.

    >>> head, *rows = measure(Bench(features=2, options={"blocks": 1, "hidden": (4,)}, quick=True), torch.device("cpu"))
    >>> [(row["what"], row["how"]) for row in rows]
    [('training step', 'plain'), ('training step', 'recomputation'), ('log_prob', ''), ('sampling', '')]
    """
    flow, batch, samples = bench.build(device), int(bench.batch_size or 0), int(bench.samples or 0)
    rates = Rates.of(device, bench.precision, bench.quick)
    parameters = sum(p.numel() for p in flow.parameters())
    yield {
        **environment(device),
        **dataclasses.asdict(bench),
        "config": flow.config and flow.config.to_dict(),
        "parameters": parameters,
        "operations_per_second": rates.operations,
        "bytes_per_second": rates.bytes,
    }
    data = made_up(flow, 4 * batch)
    work = Work.of(flow, batch)

    def row(what: str, how: str, rows: int, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {"what": what, "how": how, "rows": rows}
        try:
            found |= run()
        except (ValueError, ArithmeticError, RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            why = str(error).partition("\n")[0]
            return found | {"failed": f"{type(error).__name__}: {why}", "impossible": isinstance(error, ValueError)}
        found["rows_per_second"] = 1e3 * rows / found["milliseconds"].median
        return found if what == "sampling" else found | work.floors(found, rates, what == "training step")

    recomputable = any(isinstance(m, Residual) and m.repeatable for m in flow.modules())
    for graph in (False, True) if device.type == "cuda" else (False,):
        for recompute in (False, True) if recomputable else (False,):

            def train(graph: bool = graph, recompute: bool = recompute) -> dict[str, Any]:
                with training(flow, data, batch, bench.precision, graph, recompute) as advance:
                    return observe(advance, bench.rounds, device, warm_up=9 if graph else 2)

            how = " and ".join([*(["CUDA graph"] if graph else []), *(["recomputation"] if recompute else [])])
            yield row("training step", how or "plain", batch, train)
            free(device)
    flow.eval()
    x = data.values(flow.base.anchor)[:batch]
    context = None if data.context is None else data.context[:batch]

    @torch.no_grad()
    def log_prob() -> None:
        with products(bench.precision, device):
            flow.log_prob(x, context)

    yield row("log_prob", "", batch, lambda: observe(log_prob, bench.rounds, device))
    c = None if data.context is None else data.context[:1].expand(samples, -1)
    yield row("sampling", "", samples, lambda: observe(lambda: flow.sample(samples, c), bench.rounds, device, 1))


def lines(row: Mapping[str, Any]) -> list[str]:
    """A row of `measure` in words.

    >>> for line in lines({"what": "log_prob", "how": "", "failed": "MemoryError: full"}):
    ...     print(line)
    log_prob: not measured: MemoryError: full
    """
    name = f"{row['what']}{row['how'] and ', ' + row['how']}"
    if "failed" in row:
        return [f"{name}: not measured: {row['failed']}"]
    text = f"{name}: {row['milliseconds'].text()} ms for {row['rows']}, {number(row['rows_per_second'])} rows a second"
    text += f", {number(row['mebibytes'])} MiB"
    found = [text]
    if "operations" in row:
        share, memory = row["share_of_products"], row["share_of_memory"]
        work = number(row["operations"] * 1e-9)
        found.append(f"    floors: products {share:.1%} of the time ({work} GFLOP), memory {memory:.1%}")
    seen = [f"{count} x {form}" for form, count in row["forms"].items()]
    return [*found, f"    runs: {'; '.join(seen) or 'no network that has a kernel'}"]
