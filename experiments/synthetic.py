"""What the synthetic figures share: one model trained from one seed, its numbers, and where they come from.

Every update sees points that no update saw before, so nothing can be learnt by heart: there is no validation and
no early stopping, and what is kept are the averaged weights of the end.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quarflow as qf
from quarflow.bench import processor
from quarflow.checkpoint import read_tensors, write_tensors
from quarflow.data.toy import Toy, toy
from quarflow.models import REGISTRY, ResidualConfig, from_dict
from quarflow.training import Options, Rows, Trainer, TrainingDiverged, interruptible
from quarflow.transforms import LULinear

TEST_POINTS = 20_000
HALF_WIDTH = 5.0  # of the grid on which densities in the plane are integrated
CELLS = 240  # of that grid, in each direction
SPARSE = 0.05  # the true probability of the region that counts as sparse: outside the densest 95%
SHOW_EVERY = 1.0  # seconds between two signs of progress, of runs on a GPU
VIEW = 4.0  # half width of the square on which log-densities are compared point by point


@dataclass(frozen=True)
class Model:
    """What is compared: ``options`` are those of `quarflow.models.from_dict`, or of a flow of zuko's.

    >>> Model("QuAR", {"model": "quar", "features": 2, "blocks": 1}).build().event_shape
    torch.Size([2])
    """

    label: str
    options: Mapping[str, Any]
    optimizer: str = "adam"

    def build(self) -> qf.Flow:
        """The flow with fresh weights."""
        kind = self.options["model"]
        if not kind.startswith("zuko:"):
            return from_dict(dict(self.options)).build()
        import zuko

        from quarflow.interop import from_zuko

        options = {k: v for k, v in self.options.items() if k != "model"}
        make = getattr(zuko.flows, kind.removeprefix("zuko:"))
        return from_zuko(make(**options), options["features"], standardise=True)


@dataclass(frozen=True)
class Job:
    """One model and one seed. All but ``device`` decides the result."""

    figure: str
    name: str
    model: Model
    data: str  # in `quarflow.data.toy`
    seed: int
    steps: int
    batch_size: int
    learning_rate: float
    device: str = field(default="cpu", compare=False)

    def __str__(self) -> str:
        return f"{self.figure} {self.name}, seed {self.seed}"

    @property
    def stem(self) -> str:
        """Of the names of its files."""
        return f"{self.figure}-{self.name.replace(':', '-')}-seed{self.seed}"

    def identity(self) -> dict[str, Any]:
        """What has to be the same for a result to be this job's, as it comes back from a file."""
        everything = dataclasses.asdict(self)
        del everything["device"], everything["model"]["label"]
        identity: dict[str, Any] = json.loads(json.dumps(everything))
        return identity


class Interrupted(KeyboardInterrupt):
    """Training was interrupted; its state is in a file."""


def training_options(job: Job) -> dict[str, Any]:
    """What `quarflow.fit` is called with; the rest are its defaults (warm-up, cosine decay, clipping, averages)."""
    return {
        "max_steps": job.steps,
        "batch_size": job.batch_size,
        "learning_rate": job.learning_rate,
        "optimizer": job.model.optimizer,
        "patience": None,
        "seed": job.seed,
    }


def train(job: Job, folder: Path, show: Callable[[Trainer], None]) -> dict[str, Any]:
    """Trains, evaluates, and writes ``folder/STEM.json`` and ``STEM.qf``; goes on where it was cut."""
    state, result = folder / f"{job.stem}.training", folder / f"{job.stem}.json"
    begun = begin(job, folder)
    truth = toy(job.data)
    x = truth.sample(job.steps * job.batch_size, torch.Generator().manual_seed(job.seed))
    flow = build(job)
    history = qf.fit(
        flow,
        x,
        validation=0,
        progress=show,
        checkpoint=state,
        checkpoint_seconds=20,
        resume=state.exists(),
        **training_options(job),
    )
    if history.stopped == "interrupted":
        raise Interrupted
    del x
    save(flow, folder / f"{job.stem}.qf")
    found = numbers(job, flow, history.seconds) | begun
    write_json(result, found)
    state.unlink()
    return found


def begin(job: Job, folder: Path) -> dict[str, str]:
    """Notes that a job runs here, and returns where it has run, here and before it was cut."""
    path = folder / f"{job.stem}.json"
    before = (read_json(path) or {}).get("hardware", "") if path.with_suffix(".training").exists() else ""
    here = provenance(job.device)["hardware"] or ""
    hardware = {"hardware": "; then ".join(dict.fromkeys(part for part in [*before.split("; then "), here] if part))}
    write_json(path, {"job": job.identity(), **hardware})
    return hardware


def numbers(job: Job, flow: qf.Flow, seconds: float) -> dict[str, Any]:
    """What is measured of a trained flow, and where it comes from."""
    live, every = parameters(flow)
    return {
        "job": job.identity(),
        "seed": job.seed,
        "parameters": every,
        "live_parameters": live,
        "seconds": round(seconds, 1),
        **MEASURES[toy(job.data).features](toy(job.data), flow),
        **provenance(job.device),
    }


def train_together(
    jobs: Sequence[Job], folder: Path, tell: Callable[[Job, str, Any], object], seconds: float = 20
) -> None:
    """`train` for many jobs side by side, on a CUDA device; ``tell`` as in `experiments.jobs`.

    Their states are written every so many ``seconds``, and what was cut goes on from there.
    """
    from quarflow.graph_training import GraphTrainer, run_together

    trainers: dict[GraphTrainer, Job] = {}
    begun = {}
    for job in jobs:
        begun[job.stem] = begin(job, folder)
        x = toy(job.data).sample(job.steps * job.batch_size, torch.Generator().manual_seed(job.seed)).to(job.device)
        flow = build(job)
        flow.initialise(x[:65_536])
        trainer = GraphTrainer(flow.train(), Rows(x), None, Options(**training_options(job)))
        if (state := folder / f"{job.stem}.training").exists():
            trainer.read(state)
        trainers[trainer] = job

    def write() -> None:
        for trainer, job in trainers.items():
            if trainer.history.stopped is None:
                with trainer.queued():
                    trainer.write(folder / f"{job.stem}.training")

    told = written = time.monotonic()
    with interruptible() as interrupted:

        def show() -> None:
            nonlocal told, written
            if interrupted():
                write()
                raise Interrupted
            now = time.monotonic()
            if now - told > SHOW_EVERY:
                told = now
                for trainer, job in trainers.items():
                    tell(job, "step", trainer.step)
            if now - written > seconds:
                write()
                written = time.monotonic()

        diverged = run_together(list(trainers), show)
    for trainer, job in trainers.items():
        if trainer in diverged:
            tell(job, "failed", diverged[trainer])
            continue
        save(trainer.flow, folder / f"{job.stem}.qf")
        found = numbers(job, trainer.flow, trainer.history.seconds) | begun[job.stem]
        write_json(folder / f"{job.stem}.json", found)
        (folder / f"{job.stem}.training").unlink(missing_ok=True)
        tell(job, "finished", found)


def build(job: Job) -> qf.Flow:
    """The flow of a job at its start, on its device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        return job.model.build().to(job.device)


def save(flow: qf.Flow, path: Path) -> None:
    """`quarflow.save`, or the bare weights of a flow that is not one of our models."""
    if flow.config is not None:
        qf.save(flow, path)
    else:
        write_tensors(path, flow.state_dict(), {"kind": "weights"})


def load(job: Job, folder: Path) -> qf.Flow:
    """The trained flow of a job that is finished, on the CPU."""
    path = folder / f"{job.stem}.qf"
    if job.model.options["model"] in REGISTRY:
        return qf.load(path)
    flow = job.model.build()
    flow.load_state_dict(read_tensors(path, kind="weights")[0])
    return flow.eval()


# Numbers of a trained flow.


def parameters(flow: qf.Flow) -> tuple[int, int]:
    """Parameters that are of use, and all: without those that a mask or a triangular matrix holds at zero.

    >>> parameters(qf.models.quar(2, blocks=1, hidden=(3,), actnorm=False))
    (32, 38)
    """
    every = sum(p.numel() for p in flow.parameters())
    masked = 0
    for module in flow.modules():
        mask, weight = getattr(module, "mask", None), getattr(module, "weight", None)
        if mask is not None and weight is not None and mask.shape == weight.shape:
            masked += int((mask == 0).sum())
        if isinstance(module, LULinear):  # of each square, one triangle
            masked += module.features * (module.features + 1)
    return every - masked, every


def judge(flow: qf.Flow) -> qf.Flow:
    """A copy for evaluation: in float64, and a twin with exact log-densities where those of the flow are estimates.

    >>> judge(qf.models.residual(2, blocks=1, hidden=(4,))).exact
    True
    """
    if not flow.exact and isinstance(flow.config, ResidualConfig):
        twin = dataclasses.replace(flow.config, logdet="full").build()
        twin.load_state_dict(flow.state_dict())
        return twin.to(flow.base.anchor.device, torch.float64).eval()
    return copy.deepcopy(flow).double().eval()


@torch.no_grad()
def log_density(flow: qf.Flow, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """``log q(x)``, in batches: any device and dtype -> the CPU, float64."""
    parts = x.to(flow.base.anchor).split(4096)
    return torch.cat([flow.log_prob(part, generator=generator).cpu().double() for part in parts])


def test_points(truth: Toy) -> Tensor:
    """The same for every model and seed, and apart from what any seed trains with."""
    return truth.sample(TEST_POINTS, torch.Generator().manual_seed(2**40), torch.float64)


def likelihood(truth: Toy, flow: qf.Flow) -> dict[str, float]:
    """Mean log-densities of the test points in nats, and the gap between them: ``KL(p || q)`` and its error.

    The gap is of the same points, so that what they have in common does not count towards its error.
    """
    x = test_points(truth)
    log_p, log_q = truth.log_prob(x), log_density(judge(flow), x)
    gap = log_p - log_q
    found = {
        "true_nats": log_p.mean().item(),
        "test_nats": log_q.mean().item(),
        "kl_nats": gap.mean().item(),
        "kl_nats_points_se": gap.std().item() / len(x) ** 0.5,
    }
    if not flow.exact:
        generator = torch.Generator(flow.base.anchor.device).manual_seed(0)
        found["test_nats_estimated"] = log_density(flow, x, generator).mean().item()
    return found


def line(truth: Toy, flow: qf.Flow) -> dict[str, float]:
    """On the line: `likelihood`, and the mass that the model puts where there is none."""
    x = torch.linspace(-8, 8, 16_001, dtype=torch.float64)[:, None]
    q = log_density(judge(flow), x).exp()
    outside = torch.trapezoid(q.masked_fill(truth.log_prob(x).isfinite(), 0), x[:, 0])
    return {**likelihood(truth, flow), "mass_outside": outside.item()}


def grid(half: float, cells: int) -> Tensor:
    """Midpoints of the cells of a square: (cells^2, 2), float64.

    >>> grid(1.0, 2).tolist()
    [[-0.5, -0.5], [-0.5, 0.5], [0.5, -0.5], [0.5, 0.5]]
    """
    ticks = (torch.arange(cells, dtype=torch.float64) + 0.5) * (2 * half / cells) - half
    return torch.cartesian_prod(ticks, ticks)


def sparse(log_p: Tensor, cell: float, mass: float = SPARSE) -> Tensor:
    """The points of lowest density that together hold ``mass``: the rest is the densest region of ``1 - mass``.

    >>> sparse(torch.tensor([0.7, 0.05, 0.1, 0.15]).log(), cell=1.0, mass=0.2).tolist()
    [False, True, True, False]
    """
    order = log_p.argsort()
    below = (log_p[order].exp().cumsum(0) * cell) <= mass
    inside = torch.zeros_like(below)
    inside[order] = below
    return inside


def plane(truth: Toy, flow: qf.Flow) -> dict[str, float]:
    """In the plane: `likelihood`, and how far apart the densities are where there is little or nothing.

    Integrals over a fixed grid, restricted to the sparse region ``S`` (`sparse`), in nats:

    =========================  ==========================================================================
    ``sparse_kl``              ``integral of p log(p/q) - p + q``: of the points that are there
    ``sparse_reverse_kl``      ``integral of q log(q/p) - q + p``: of the mass that the model puts there
    ``sparse_mass``            ``integral of q``; of ``p`` it is ``SPARSE``
    ``sparse_log_error``       median of ``|log q - log p|`` over the area of ``S``, however little is there
    ``sparse_rank``            Spearman's correlation of ``log q`` and ``log p`` there: of their contours
    =========================  ==========================================================================

    The first two are divergences restricted to a region: at least zero, and over all regions they add up to
    ``KL(p || q)`` and ``KL(q || p)``; ``sparse_p_log_p_q`` and ``sparse_q_log_q_p`` are the bare integrals. The
    last two weigh all places alike, which is what an eye does with a picture of contours.
    """
    x = grid(HALF_WIDTH, CELLS)
    log_p, log_q = truth.log_prob(x), log_density(judge(flow), x)
    p, q, cell = log_p.exp(), log_q.exp(), (2 * HALF_WIDTH / CELLS) ** 2
    here = sparse(log_p, cell)

    def integral(f: Tensor) -> float:
        return (f[here].sum() * cell).item()

    forward, reverse = integral(p * (log_p - log_q)), integral(q * (log_q - log_p))
    mass_p, mass_q = integral(p), integral(q)
    seen = here & (x.abs() <= VIEW).all(1)
    return {
        **likelihood(truth, flow),
        "grid_mass": (q.sum() * cell).item(),
        "grid_kl": ((p * (log_p - log_q)).sum() * cell).item(),
        "grid_reverse_kl": ((q * (log_q - log_p)).sum() * cell).item(),
        "sparse_true_mass": mass_p,
        "sparse_mass": mass_q,
        "sparse_p_log_p_q": forward,
        "sparse_q_log_q_p": reverse,
        "sparse_kl": forward - mass_p + mass_q,
        "sparse_reverse_kl": reverse - mass_q + mass_p,
        "sparse_log_error": (log_q - log_p)[seen].abs().median().item(),
        "sparse_rank": rank_correlation(log_p[seen], log_q[seen]),
    }


MEASURES: dict[int, Callable[[Toy, qf.Flow], dict[str, float]]] = {1: line, 2: plane}


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's, of values without ties.

    >>> rank_correlation(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([-1.0, 0.0, 0.1]))
    1.0
    """
    ranks = torch.stack([t.argsort().argsort().double() for t in (a, b)])
    return torch.corrcoef(ranks)[0, 1].item()


# Time.


@contextmanager
def one_thread() -> Iterator[None]:
    """What is compared has one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def step_ms(jobs: Sequence[Job], rounds: int) -> dict[str, float]:
    """The median time of a training step for each name: in turns, so that a slow moment is one for all."""
    from quarflow.graph_training import WARM_UP, GraphTrainer

    trainers, skip = {}, WARM_UP + 3
    for job in jobs:
        options = Options(**{**training_options(job), "max_steps": rounds + skip})
        x = toy(job.data).sample(4 * job.batch_size, torch.Generator().manual_seed(job.seed))
        flow = build(job)
        flow.initialise(x.to(job.device))
        kind = GraphTrainer if torch.device(job.device).type == "cuda" else Trainer
        trainers[job.name] = kind(flow.train(), Rows(x.to(job.device)), None, options)
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    with one_thread(), torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(rounds + skip):
            for name, trainer in trainers.items():
                start = time.perf_counter()
                with suppress(TrainingDiverged):  # of the run itself this is told; here only time counts
                    trainer.advance()
                if trainer.learning_rate.is_cuda:
                    torch.cuda.synchronize()
                seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(found[skip:]) for name, found in seconds.items()}


# Results.


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over seeds of all numbers of the runs, each with its standard error (None for one seed).

    >>> summary([{"kl": 1.0}, {"kl": 3.0}])
    {'kl': 2.0, 'kl_se': 1.0}
    """
    found: dict[str, Any] = {}
    for key, value in runs[0].items():
        if isinstance(value, float) and key not in ("true_nats", "kl_nats_points_se"):
            found[key], found[f"{key}_se"] = mean_and_error([run[key] for run in runs])
    return found


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error.

    >>> mean_and_error([1.0])
    (1.0, None)
    """
    n = len(values)
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(n) if n > 1 else None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """All or nothing."""
    text = json.dumps(value, indent=1, allow_nan=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """None if the file is not there."""
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


def provenance(device: str) -> dict[str, str | None]:
    """Where and when, of what: hardware, versions, date and commit, and nothing that names the machine."""
    hardware = f"one thread of {processor()} ({os.cpu_count()} cores)"
    if torch.device(device).type == "cuda":
        hardware = f"{torch.cuda.get_device_name(device)}, {hardware}"
    return {
        "hardware": hardware,
        "versions": f"quarflow {qf.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
    }


def commit() -> str | None:
    """``QUARFLOW_COMMIT``, or else git's, with ``-dirty`` where the code differs from it; None without git."""
    if said := os.environ.get("QUARFLOW_COMMIT"):
        return said

    def git(*arguments: str) -> str:
        folder = Path(__file__).resolve().parent
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        root = git("rev-parse", "--show-toplevel")
        if git("ls-files", "--", __file__) == "":  # installed inside some other repository
            raise FileNotFoundError(root)
        code = [f"{root}/quarflow", f"{root}/experiments/*.py"]
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", *code)
        return git("rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None
