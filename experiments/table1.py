"""Table 1: bits per dimension of four flows of images, each trained for the same time by the same engine.

The paper compares Glow, Flow++ with uniform noise, residual flows and QuAR on MNIST and CIFAR-10, by numbers that were
published. Here all four have their published size, one code base, one preprocessing (a logit; MNIST is not padded),
one evaluation, and the same minutes. Each is trained twice: with the optimiser settings of its authors
(``"published"``), but for warm-up and schedule, which are the engine's, since theirs were made for days; and with the
engine's own (``"engine"``).

Each run is a folder as ``quarflow train`` writes it, ``OUT/runs/DATA-SYSTEM-SETTINGS``. One that is finished is kept,
one that was cut goes on.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.drawing import COLOURS, canvas, plain, save_png
from experiments.jobs import Mismatch
from experiments.synthetic import parameters, provenance, read_json, write_json
from quarflow.checkpoint import load
from quarflow.checks import check_choice, check_count, check_positive
from quarflow.data.images import SOURCES, Images
from quarflow.runs import TRAINING, Run, images_of, train
from quarflow.training import Options, Rows, Trainer, TrainingDiverged

NAME = "table1"
DATA = ("mnist", "cifar10")
SETTINGS = ("published", "engine")
ROUNDS = 20  # of timing
BATCH = 64  # images of a timed draw


@dataclass(frozen=True)
class System:
    """A model of the table: its options by data set, its authors' optimiser settings and bits/dim."""

    label: str
    model: str
    published: Mapping[str, Any]
    bpd: Mapping[str, float]
    options: Mapping[str, Any] = field(default_factory=dict)  # beyond the sizes of `quarflow.runs`
    of_data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # and those of one data set


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
        of_data={"cifar10": {"hidden": 512}},
    ),
    # Kingma & Dhariwal 2018: 64 images on each of 8 devices, no average of the weights.
    "glow": System(
        "Glow",
        "glow",
        {"learning_rate": 1e-3, "batch_size": 512, "ema": 0.0, "clip": None, "optimizer": "adamax"},
        {"mnist": 1.05, "cifar10": 3.35},
    ),
    # Ho et al. 2019.
    "flowpp": System(
        "Flow++",
        "flowpp",
        {"learning_rate": 3e-4, "batch_size": 64, "ema": 0.999, "clip": 1.0},
        {"cifar10": 3.29},
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
    device: str = "cpu"
    folder: str | None = None
    download: bool = False

    def __post_init__(self) -> None:
        for name, choices in {"data": SOURCES, "models": SYSTEMS, "settings": SETTINGS}.items():
            if not getattr(self, name) and name != "models":
                raise ValueError(f"{name}: expected one or more of {', '.join(choices)}; got none.")
            for value in getattr(self, name):
                check_choice(name, value, choices)
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
        }
        own = chosen.published if settings == "published" else TRAINING
        given = {"folder": self.folder, "download": self.download}
        sections = {"model": options, "training": {**own, **limits}, "data": given, "run": {"draws": 1}}
        return Run.of(data, sections)

    def command(self) -> str:
        """The command that makes it."""
        words = ["quarflow", "reproduce", NAME]
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value == f.default or f.name in ("folder", "download"):
                continue
            words += [f"--{f.name}", ",".join(value) if isinstance(value, tuple) else str(value)]
        return shlex.join(words)


def reproduce(
    table: Table, out: Path, fresh: bool = False, say: Callable[[str], object] = lambda text: None
) -> list[Path]:
    """Trains what is not finished; writes ``table1.json``, ``.md``, ``.png`` and a grid of samples for each run."""
    planned = [
        (data, system, settings)
        for data in table.data
        for system in table.models or SYSTEMS
        for settings in table.settings
    ]
    (out / "runs").mkdir(parents=True, exist_ok=True)
    for names in planned:  # an error now, not after hours
        _same(table.run(*names), out / "runs" / "-".join(names), fresh)
    images: dict[str, Images] = {}
    found: dict[str, Any] = {}
    for data, system, settings in planned:
        run, folder = table.run(data, system, settings), out / "runs" / f"{data}-{system}-{settings}"
        numbers = read_json(folder / "table1.json")
        if numbers is None:
            if data not in images:
                images[data] = images_of(data, run.data)
            say(f"{data}: {SYSTEMS[system].label}, {settings} settings")
            numbers = _numbers(run, images[data], folder, table.device, say)
            write_json(folder / "table1.json", numbers)
        entry = found.setdefault(data, {}).setdefault(
            system, {"label": SYSTEMS[system].label, "published_bpd": SYSTEMS[system].bpd.get(data)}
        )
        # The first of the settings is that of the row itself.
        entry |= numbers if settings == table.settings[0] else {settings: numbers}
    head = {
        "figure": NAME,
        "command": table.command(),
        **provenance(table.device),
        "settings": {"minutes": table.minutes, "steps": table.steps, "of": table.settings[0]},
    }
    written = [out / f"{NAME}.json", out / f"{NAME}.md", out / f"{NAME}.png"]
    write_json(written[0], {**head, **found})
    written[1].write_text(markdown({**head, **found}) + "\n")
    draw(planned, out, written[2])
    return written + [path for each in planned if (path := out / "runs" / "-".join(each) / "samples.png").exists()]


def _same(run: Run, folder: Path, fresh: bool) -> None:
    """An error where a folder is of another run."""
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    config = folder / "config.toml"
    if config.exists() and config.read_text() != run.to_toml():
        raise Mismatch(
            f"{folder}: a run with other options is there. Give its options, another --out, or --fresh to train anew."
        )


def _numbers(
    run: Run, images: Images, folder: Path, device: str, say: Callable[[str], object]
) -> dict[str, Any]:
    """What is measured of a run, which is trained, or trained on, first."""
    with torch.random.fork_rng():
        live, every = parameters(run.build(images.shape))
    numbers: dict[str, Any] = {"parameters": live, "parameters_with_masked": every}
    numbers |= {"test_bpd": None, "test_bpd_se": None, "sample_ms": None, "diverged": None}
    started = time.monotonic()
    folder.mkdir(exist_ok=True)
    try:
        result = read_json(folder / "result.json") or train(run, folder, device, resume=True, say=say)
        numbers |= {name: result[name] for name in ("test_bpd", "test_bpd_se", "validation_bpd", "steps", "minutes")}
        numbers["sample_ms"] = sample_ms(folder / "model.qf", device)
    except TrainingDiverged as error:
        steps = error.history.steps
        numbers |= {"diverged": str(error), "steps": steps[-1] if steps else 0}
        numbers["minutes"] = (time.monotonic() - started) / 60
        say(f"diverged: {error}")
    return {**numbers, **step_costs(run, images, device), **provenance(device)}


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
    """The median milliseconds of a training step, and, on a CUDA device, the most memory that one takes."""
    flow = run.build(images.shape).to(device)
    rows = Rows(images.train[: max(256, 2 * run.training.batch_size)].to(device))
    options = Options(**dataclasses.asdict(run.training) | {"max_steps": ROUNDS + 3, "max_seconds": None})
    found: list[float] = []
    cuda = torch.device(device).type == "cuda"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        flow.initialise(rows.values(flow.base.anchor))
        trainer = Trainer(flow.train(), rows, None, options)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            for _ in range(ROUNDS + 3):
                start = time.perf_counter()
                trainer.advance()
                _wait(device)
                found.append(time.perf_counter() - start)
        except TrainingDiverged:  # of the run itself this is told; here only time counts
            pass
    memory = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
    return {"step_ms": 1e3 * statistics.median(found[3:] or found), "memory_mib": memory}


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def markdown(result: Mapping[str, Any]) -> str:
    """The table, a row for each run.

    >>> row = {"label": "Glow", "published_bpd": 1.05, "test_bpd": 1.2, "test_bpd_se": 0.01, "parameters": 1000}
    >>> row |= {"parameters_with_masked": 1000, "minutes": 5.0, "steps": 9, "step_ms": 2.0, "memory_mib": None}
    >>> result = {"settings": {"of": "published"}, "mnist": {"glow": row | {"sample_ms": 0.5}}}
    >>> print(markdown(result).splitlines()[-1][:55])
    | mnist | Glow | published | 1.05 | 1.200 ± 0.010 | 1,0
    """
    head = ["data", "system", "settings", "published bits/dim", "bits/dim", "parameters (with masked)"]
    head += ["minutes", "steps", "step, ms", "memory, MiB", "draw, ms"]
    lines = [head, ["---"] * len(head)]
    for data in SOURCES:
        for system in result.get(data, {}).values():
            rows = {result["settings"]["of"]: system, **{name: system[name] for name in SETTINGS if name in system}}
            for settings, row in rows.items():
                bpd = "diverged" if row["test_bpd"] is None else f"{row['test_bpd']:.3f} ± {row['test_bpd_se']:.3f}"
                published = system["published_bpd"]
                lines.append(
                    [
                        data,
                        system["label"],
                        settings,
                        "" if published is None else str(published),
                        bpd,
                        f"{row['parameters']:,} ({row['parameters_with_masked']:,})",
                        f"{row['minutes']:.1f}",
                        f"{row['steps']:,}",
                        f"{row['step_ms']:.1f}",
                        "" if row["memory_mib"] is None else f"{row['memory_mib']:,.0f}",
                        "" if row["sample_ms"] is None else f"{row['sample_ms']:.2f}",
                    ]
                )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(planned: list[tuple[str, str, str]], out: Path, path: Path) -> None:
    """Bits/dim on held-out images against minutes of training: a panel for each data set."""
    sets = list(dict.fromkeys(data for data, _, _ in planned))
    figure = canvas(4.2 * len(sets), 3.0)
    panels = dict(zip(sets, figure.subplots(1, len(sets), squeeze=False)[0], strict=True))
    colours = dict(zip(SYSTEMS, COLOURS, strict=False))
    for data, system, settings in planned:
        log = out / "runs" / f"{data}-{system}-{settings}" / "log.jsonl"
        entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        seen = [each for each in entries if "validation_bpd" in each]
        panels[data].plot(
            [each["seconds"] / 60 for each in seen],
            [each["validation_bpd"] for each in seen],
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
