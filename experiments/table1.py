"""Table 1: bits per dimension of four flows of images, each trained for the same time by the same engine.

The paper compares Glow, Flow++ with uniform noise, residual flows and QuAR on MNIST and CIFAR-10, by numbers that were
published. Here all four have their published size, one code base, one preprocessing (a logit; MNIST is not padded),
one evaluation, and the same minutes. Each is trained twice: with the optimiser settings of its authors
(``"published"``), but for warm-up and schedule, which are the engine's, since theirs were made for days; and with the
engine's own (``"engine"``).

A run that is finished is in ``OUT/table1.json``, its samples are in ``OUT/table1_DATA_samples.png``: these are all that
the next command needs, on any machine, for the runs that are left. One that was cut is a folder as ``quarflow train``
writes it, ``OUT/runs/DATA-SYSTEM-SETTINGS``, and goes on where that folder is.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import shlex
import shutil
import statistics
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.drawing import COLOURS, canvas, plain, save_png
from experiments.images import curve
from experiments.jobs import Mismatch
from experiments.synthetic import parameters, provenance, read_json, write_json
from quarflow.checkpoint import load
from quarflow.checks import check_choice, check_count, check_positive
from quarflow.data.images import SOURCES, Images
from quarflow.graph_training import SIZES, WARM_UP, GraphTrainer
from quarflow.precision import PRECISIONS
from quarflow.runs import TRAINING, Run, images_of, train
from quarflow.training import Options, Rows, Trainer, TrainingDiverged

NAME = "table1"
DATA = ("mnist", "cifar10")
SETTINGS = ("published", "engine")
SAID = ("label", "published_bpd", "published_parameters")  # of a system, whatever its settings
VALIDATION = {"digits": 0.1}  # the part of the training images that chooses the weights; else 1000 or so
ROUNDS = 20  # of timing
FIRST = WARM_UP + 2 * len(SIZES)  # steps on a GPU in which kernels are compiled and graphs are captured
BATCH = 64  # images of a timed draw
TILE = 280  # pixels for a grid of samples


@dataclass(frozen=True)
class System:
    """A model of the table: its options by data set, its authors' optimiser settings, bits/dim and parameters."""

    label: str
    model: str
    published: Mapping[str, Any]
    bpd: Mapping[str, float]
    size: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # beyond the sizes of `quarflow.runs`
    of_data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # and those of one data set
    evaluate_every: int | None = None


SYSTEMS = {
    # Gopal 2020: Adam, no clipping is mentioned.
    "quar": System(
        "QuAR",
        "quar_image",
        {"learning_rate": 1e-3, "batch_size": 64, "ema": 0.999, "clip": None},
        {"mnist": 0.963, "cifar10": 3.378},
        of_data={"cifar10": {"hidden": 528}},
    ),
    # Chen et al. 2019.
    "residual": System(
        "Residual flow",
        "residual_image",
        {"learning_rate": 1e-3, "batch_size": 64, "ema": 0.999, "clip": 1.0},
        {"mnist": 0.970, "cifar10": 3.280},
        {"mnist": 16.6e6, "cifar10": 25.2e6},
        {"dense_blocks": 4},
        {"cifar10": {"hidden": 512}},
        500,  # a density has five times the terms of a step
    ),
    # Kingma & Dhariwal 2018: 64 images on each of 8 devices, no average of the weights.
    "glow": System(
        "Glow",
        "glow",
        {"learning_rate": 1e-3, "batch_size": 512, "ema": 0.0, "clip": None, "optimizer": "adamax"},
        {"mnist": 1.05, "cifar10": 3.35},
        {"cifar10": 44.0e6},
    ),
    # Ho et al. 2019.
    "flowpp": System(
        "Flow++",
        "flowpp",
        {"learning_rate": 3e-4, "batch_size": 64, "ema": 0.999, "clip": 1.0},
        {"cifar10": 3.29},
        {"cifar10": 32.3e6},  # of the ablation with uniform noise, which the 3.29 are of; the whole model has 31.4 M
        {"dropout": 0.2},
    ),
}


@dataclass(frozen=True)
class Table:
    """What to train, and for how long.

    >>> Table(data=("mnist",), minutes=1.0).command()
    'quarflow reproduce table1 --data mnist --minutes 1.0'
    """

    data: tuple[str, ...] = DATA
    models: tuple[str, ...] = ()  # () for all
    settings: tuple[str, ...] = SETTINGS
    minutes: float | None = None  # of each run; 5 if there is no number of steps either
    steps: int | None = None
    precision: str = "full"  # of all runs
    graph: bool = True  # on a GPU
    device: str = "cpu"
    folder: str | None = None
    download: bool = False

    def __post_init__(self) -> None:
        for name, choices in {"data": SOURCES, "models": SYSTEMS, "settings": SETTINGS}.items():
            if not getattr(self, name) and name != "models":
                raise ValueError(f"{name}: expected one or more of {', '.join(choices)}; got none.")
            for value in getattr(self, name):
                check_choice(name, value, choices)
        check_choice("precision", self.precision, PRECISIONS)
        if self.steps is not None:
            check_count("steps", self.steps)
        elif self.minutes is None:
            object.__setattr__(self, "minutes", 5.0)
        if self.minutes is not None:
            check_positive("minutes", self.minutes)

    def run(self, data: str, system: str, settings: str) -> Run:
        """One run of the table."""
        chosen = SYSTEMS[system]
        options = {"name": chosen.model, **chosen.options, **chosen.of_data.get(data, {})}
        limits = {
            "max_steps": self.steps,
            "max_seconds": None if self.minutes is None else 60 * self.minutes,
            "patience": None,
            "precision": self.precision,
            "evaluate_every": chosen.evaluate_every,
        }
        own = chosen.published if settings == "published" else TRAINING
        given = {"folder": self.folder, "download": self.download}
        own_run = {"draws": 1, "graph": self.graph, "validation": VALIDATION.get(data, 0.02)}
        sections = {"model": options, "training": {**own, **limits}, "data": given, "run": own_run}
        return Run.of(data, sections)

    def command(self) -> str:
        """The command that makes it."""
        return command(NAME, self)


def command(name: str, options: Any) -> str:
    """The command of what a dataclass says that differs from its defaults."""
    words = ["quarflow", "reproduce", name]
    for f in dataclasses.fields(options):
        value = getattr(options, f.name)
        if value == f.default or f.name in ("folder", "download"):
            continue
        given = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [f"--no-{f.name}"] if value is False else [f"--{f.name}", given]
    return shlex.join(words)


def reproduce(
    table: Table, out: Path, fresh: bool = False, say: Callable[[str], object] = lambda text: None
) -> list[Path]:
    """Trains what is not finished; writes ``table1.json``, ``.md``, ``.png`` and a picture of samples of each data set.

    They have all runs that were in the file before, of other systems too. The file is written after each run.
    """
    planned = [
        (data, system, settings)
        for data in table.data
        for settings in table.settings
        for system in table.models or SYSTEMS
    ]
    (out / "runs").mkdir(parents=True, exist_ok=True)
    found = read_json(out / f"{NAME}.json") or {}
    for names in planned:  # an error now, not after hours
        _same(table.run(*names), out, names, found, fresh)
    images: dict[str, Images] = {}
    try:
        for names in planned:
            if row_of(found, *names) is not None:
                continue
            run, (data, system, settings), folder = table.run(*names), names, out / "runs" / "-".join(names)
            if data not in images:
                images[data] = images_of(data, run.data)
            of = SYSTEMS[system]
            say(f"{data}: {of.label}, {settings} settings")
            numbers = _numbers(run, images[data], folder, table.device, say) | {"command": table.command()}
            row = found.setdefault(data, {}).setdefault(system, {})
            row |= dict(zip(SAID, (of.label, of.bpd.get(data), of.size.get(data)), strict=True))
            # The published settings are those of the row itself.
            row |= numbers if settings == SETTINGS[0] else {settings: numbers}
            if (folder / "samples.png").exists():
                paste(folder / "samples.png", out / f"{NAME}_{data}_samples.png", system, settings)
            write_json(out / f"{NAME}.json", {"figure": NAME, **found})
    finally:  # also of a part
        if any(rows(found)):
            (out / f"{NAME}.md").write_text(markdown(found) + "\n")
            draw(found, out / f"{NAME}.png")
    samples = [out / f"{NAME}_{data}_samples.png" for data in table.data]
    return [out / f"{NAME}.json", out / f"{NAME}.md", out / f"{NAME}.png", *(path for path in samples if path.exists())]


def row_of(result: Mapping[str, Any], data: str, system: str, settings: str) -> dict[str, Any] | None:
    """What is known of a run, if it is finished."""
    row = result.get(data, {}).get(system, {})
    found: dict[str, Any] | None = row if settings == SETTINGS[0] else row.get(settings)
    return found if found and "config" in found else None


def rows(result: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    """All runs that are finished, in the order of the table: data, system, settings; what is known."""
    for data in SOURCES:
        for system in SYSTEMS:
            for settings in SETTINGS:
                if row := row_of(result, data, system, settings):
                    yield (data, system, settings), row


def _config(run: Run) -> str:
    """What decides the result of a run."""
    return dataclasses.replace(run, data={}).to_toml()


def _same(run: Run, out: Path, names: tuple[str, str, str], found: dict[str, Any], fresh: bool) -> None:
    """An error where what is there is of another run; with ``fresh`` it is gone."""
    folder, row = out / "runs" / "-".join(names), row_of(found, *names)
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
        for key in [key for key in row or {} if key not in (*SETTINGS, *SAID)]:
            del (row or {})[key]
        return
    config = folder / "config.toml"
    goes_on = not config.exists() or config.read_text() == run.to_toml()
    for where, same in ((folder, goes_on), (out / f"{NAME}.json", row is None or alike(row["config"], _config(run)))):
        if not same:
            raise Mismatch(
                f"{where}: {'-'.join(names)} is there with other options. Give these, another --out, or --fresh to "
                "train anew."
            )


def alike(one: str, other: str) -> bool:
    """Whether two configurations are of the same run: an option that one does not know of yet is no difference.

    >>> run = "[model]\\nhidden = 4\\n[training]\\nclip = 1.0"
    >>> alike(run, run + "\\nema = 0.9"), alike(run, run.replace("1.0", "2.0")), alike(run, run.replace("4", "8"))
    (True, False, False)
    """
    a, b = tomllib.loads(one), tomllib.loads(other)
    both = [(a[name], b[name]) for name in ("training", "run") if name in a and name in b]
    return a["model"] == b["model"] and all(x[key] == y[key] for x, y in both for key in x.keys() & y.keys())


def _numbers(
    run: Run, images: Images, folder: Path, device: str, say: Callable[[str], object]
) -> dict[str, Any]:
    """What is measured of a run, which is trained, or trained on: steps first, so that kernels are compiled then."""
    with torch.random.fork_rng():
        live, every = parameters(run.build(images.shape))
    numbers: dict[str, Any] = {"parameters": live, "parameters_with_masked": every}
    numbers |= {"test_bpd": None, "test_bpd_se": None, "validation_bpd": None, "sample_ms": None, "diverged": None}
    folder.mkdir(exist_ok=True)
    costs = read_json(folder / "costs.json")  # of a run that was cut after that
    if costs is None:
        costs = step_costs(run, images, device)
        write_json(folder / "costs.json", costs)
    gc.collect()  # a graph holds its memory
    started = time.monotonic()
    try:
        result = read_json(folder / "result.json") or train(run, folder, device, resume=True, say=say)
        numbers |= {name: result[name] for name in ("test_bpd", "test_bpd_se", "validation_bpd", "steps", "minutes")}
        numbers["sample_ms"] = sample_ms(folder / "model.qf", device)
    except TrainingDiverged as error:
        steps = error.history.steps
        numbers |= {"diverged": str(error), "steps": steps[-1] if steps else 0}
        numbers["minutes"] = (time.monotonic() - started) / 60
        say(f"diverged: {error}")
    seen = {"curve": curve(folder / "log.jsonl"), "config": _config(run)}
    return {**numbers, **costs, **seen, **provenance(device)}


def paste(grid: Path, into: Path, system: str, settings: str) -> None:
    """A grid of samples at its place in a picture of a data set: a column for each system, a row for each settings."""
    from PIL import Image

    size = (TILE * len(SYSTEMS), TILE * len(SETTINGS))
    whole = Image.new("RGB", size, "white")
    if into.exists():
        with Image.open(into) as before:
            whole.paste(before.convert("RGB"))
    with Image.open(grid) as picture:
        times = max(1, TILE // max(picture.size))
        tile = picture.convert("RGB").resize([times * n for n in picture.size], Image.Resampling.NEAREST)
    whole.paste(tile, (TILE * list(SYSTEMS).index(system), TILE * SETTINGS.index(settings)))
    whole.save(into, optimize=True)


def sample_ms(path: Path, device: str) -> float:
    """Milliseconds of a draw in a batch of `BATCH`."""
    flow, found = load(path, device), []
    for _ in range(3):
        start = time.perf_counter()
        flow.sample(BATCH)
        _wait(device)
        found.append(time.perf_counter() - start)
    return 1e3 * min(found) / BATCH


def step_costs(run: Run, images: Images, device: str) -> dict[str, float | None]:
    """The median milliseconds of a training step, the seconds that the first ones take beyond that, to compile kernels
    and capture graphs, and, on a CUDA device, the most memory.
    """
    flow = run.build(images.shape).to(device)
    cuda = torch.device(device).type == "cuda"
    some = Rows(images.train[: max(256, 2 * run.training.batch_size)].to(device))
    first = FIRST if cuda and run.graph else 3
    steps = first + ROUNDS
    options = Options(**dataclasses.asdict(run.training) | {"max_steps": steps, "max_seconds": None})
    found: list[float] = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        flow.initialise(some.values(flow.base.anchor))
        trainer = (GraphTrainer if cuda and run.graph else Trainer)(flow.train(), some, None, options)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        # A run that diverges says so itself; here only time counts.
        with suppress(TrainingDiverged), trainer.queued():
            for _ in range(steps):
                start = time.perf_counter()
                trainer.advance()
                _wait(device)
                found.append(time.perf_counter() - start)
    step = statistics.median(found[first:] or found)
    memory = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
    return {
        "step_ms": 1e3 * step,
        "compile_seconds": max(0.0, math.fsum(found[:first]) - step * len(found[:first])),
        "memory_mib": memory,
    }


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def markdown(result: Mapping[str, Any]) -> str:
    """The table, a row for each run.

    >>> row = {"label": "Glow", "published_bpd": 1.05, "test_bpd": 1.2, "test_bpd_se": 0.01, "parameters": 1000}
    >>> row |= {"parameters_with_masked": 1000, "published_parameters": None, "minutes": 5.0, "steps": 9}
    >>> row |= {"step_ms": 2.0, "compile_seconds": 1.0, "memory_mib": None, "config": ""}
    >>> print(markdown({"mnist": {"glow": row | {"sample_ms": 0.5}}}).splitlines()[-1][:55])
    | mnist | Glow | published | 1.05 | 1.200 ± 0.010 | 1,0
    """
    head = ["data", "system", "settings", "published bits/dim", "bits/dim", "parameters (with masked)"]
    head += ["published", "minutes", "steps", "step, ms", "first steps, s", "memory, MiB", "draw, ms"]
    lines = [head, ["---"] * len(head)]
    for (data, system, settings), row in rows(result):
        entry = result[data][system]
        lines.append(
            [
                data,
                entry["label"],
                settings,
                _or_nothing(entry["published_bpd"], ""),
                "diverged" if row["test_bpd"] is None else f"{row['test_bpd']:.3f} ± {row['test_bpd_se']:.3f}",
                f"{row['parameters']:,} ({row['parameters_with_masked']:,})",
                _or_nothing(entry["published_parameters"], ",.0f"),
                f"{row['minutes']:.1f}",
                f"{row['steps']:,}",
                f"{row['step_ms']:.1f}",
                f"{row['compile_seconds']:.1f}",
                _or_nothing(row["memory_mib"], ",.0f"),
                _or_nothing(row["sample_ms"], ".2f"),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _or_nothing(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Bits/dim on held-out images against minutes of training: a panel for each data set."""
    sets = [data for data in SOURCES if data in result]
    figure = canvas(4.2 * len(sets), 3.0)
    panels = dict(zip(sets, figure.subplots(1, len(sets), squeeze=False)[0], strict=True))
    colours = dict(zip(SYSTEMS, COLOURS, strict=False))
    for (data, system, settings), row in rows(result):
        panels[data].plot(
            [minutes for minutes, _ in row["curve"]],
            [bits for _, bits in row["curve"]],
            color=colours[system],
            linestyle="-" if settings == SETTINGS[0] else ":",
            linewidth=1.2,
            label=f"{SYSTEMS[system].label}, {settings}",
        )
    for data, panel in panels.items():
        plain(panel)
        panel.set_title(data, fontsize=9)
        panel.set_xlabel("minutes", fontsize=8)
        panel.set_ylabel("bits/dim, held-out images", fontsize=8)
        panel.tick_params(labelsize=7)
        # What matters is where they end: the first steps are off the scale.
        ends = [line.get_ydata()[-1] for line in panel.lines if len(line.get_ydata())]
        if ends:
            panel.set_ylim(min(ends) - 0.1, max(ends) + max(1.0, max(ends) - min(ends)))
        panel.legend(fontsize=6, frameon=False)
    save_png(figure, path)
