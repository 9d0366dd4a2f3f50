"""From a command to pictures: the jobs of each figure are run, put together, and drawn."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from experiments import figure2, figure3, figures4_6
from experiments.jobs import Mismatch as Mismatch
from experiments.jobs import Tell, finished, forget, run
from experiments.synthetic import TEST_POINTS, Job, Model, one_thread, provenance, read_json, step_ms, write_json
from quarflow.checks import check_choice, check_count, check_positive

FIGURES = (figure2.NAME, figure3.NAME, figures4_6.NAME)
ROUNDS = 40  # of timing
OF_FIGURE3 = ("models", "also")


@dataclass(frozen=True)
class Settings:
    """What to reproduce, and how.

    >>> Settings(figures=("figure2",), steps=100).command()
    'quarflow reproduce figure2 --steps 100'
    """

    figures: tuple[str, ...] = FIGURES
    steps: int = 20_000
    seeds: int = 5
    batch_size: int = 256
    learning_rate: float = 1e-3
    device: str = "cpu"
    models: tuple[str, ...] = ()  # of figure 3; () for all of its own
    also: tuple[str, ...] = ()  # more for figure 3

    def __post_init__(self) -> None:
        for name in self.figures:
            check_choice("figure", name, FIGURES)
        for name in ("steps", "seeds", "batch_size"):
            check_count(name, getattr(self, name))
        check_positive("learning_rate", self.learning_rate)
        for name in self.models:
            check_choice("models", name, figure3.MODELS)
        for name in OF_FIGURE3:
            if getattr(self, name) and set(self.figures) == {figure2.NAME}:
                raise ValueError(f"{name}: figure2 compares QuAR with itself; choose models for figure3 or figures4-6.")
        kind = torch.device(self.device).type  # a RuntimeError, with all devices, if there is none of that name
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError("device: expected a device of this machine; got 'cuda', and torch sees none. Use cpu.")
        self.compared()

    def compared(self) -> dict[str, Model]:
        """The models of figure 3, by name."""
        own = {name: figure3.MODELS[name] for name in self.models or figure3.MODELS}
        return own | {name: figure3.also(name) for name in self.also if name not in own}

    def jobs(self, figure: str) -> list[Job]:
        """All jobs that a figure needs, the seeds of a model one after the other."""
        own, data, models = figure2.NAME, figure2.DATA, figure2.MODELS
        if figure != figure2.NAME:  # the others look at the flows of figure 3
            own, data, models = figure3.NAME, figure3.DATA, self.compared()
        seeds = range(1 if figure == figures4_6.NAME else self.seeds)
        return [
            Job(
                own,
                name,
                model,
                data,
                seed,
                self.steps,
                self.batch_size,
                self.learning_rate,
                self.device,
            )
            for name, model in models.items()
            for seed in seeds
        ]

    def command(self, figure: str | None = None) -> str:
        """The command for these settings, or for one figure of them."""
        figures = (figure,) if figure else self.figures
        words = ["quarflow", "reproduce", figures[0] if len(figures) == 1 else "all"]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "figures" or value == f.default or (figures == (figure2.NAME,) and f.name in OF_FIGURE3):
                continue
            words += [f"--{f.name.replace('_', '-')}", ",".join(value) if isinstance(value, tuple) else str(value)]
        return shlex.join(words)


def reproduce(
    settings: Settings,
    out: Path,
    workers: int = 1,
    fresh: bool = False,
    tell: Tell = lambda job, state, value: None,
    say: Callable[[str], object] = lambda text: None,
) -> tuple[list[Job], list[Path]]:
    """Runs what is not finished, and writes ``out/FIGURE.json`` and pictures: jobs that failed, files written.

    A figure of which a job failed is left out. The runs are in ``out/runs``, see `jobs`.
    """
    runs = out / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    planned = {name: settings.jobs(name) for name in settings.figures}
    jobs = list({job.stem: job for each in planned.values() for job in each}.values())
    if fresh:
        for job in jobs:
            forget(job, runs)
        for name in planned:
            (runs / f"{name}-timing.json").unlink(missing_ok=True)
    for job in jobs:
        finished(job, runs)  # an error now, not after hours
    timings = {name: timing(name, planned[name], runs, say) for name in planned if name != figures4_6.NAME}
    cost = {f"{figure} {name}": ms for figure, found in timings.items() for name, ms in found["step_ms"].items()}
    failed = run(jobs, runs, workers, tell, cost)
    written: list[Path] = []
    for name, each in planned.items():
        if not any(job in failed for job in each):
            written += write(name, each, timings.get(name), settings, out)
    return failed, written


def timing(name: str, jobs: Sequence[Job], runs: Path, say: Callable[[str], object]) -> dict[str, Any]:
    """Milliseconds of a step of each model, measured once, while nothing else runs."""
    first = [job for job in jobs if job.seed == 0]
    path, of = runs / f"{name}-timing.json", {job.name: job.identity() for job in first}
    found = read_json(path)
    if found is None or found["of"] != of:
        say(f"timing the training steps of {name}")
        found = {"of": of, "step_ms": step_ms(first, min(ROUNDS, first[0].steps)), **provenance(first[0].device)}
        write_json(path, found)
    return found


def write(
    name: str, jobs: Sequence[Job], timed: Mapping[str, Any] | None, settings: Settings, out: Path
) -> list[Path]:
    """The results and pictures of a figure whose jobs are finished."""
    runs = out / "runs"
    found: dict[str, list[dict[str, Any]]] = {}
    for job in jobs:
        numbers = finished(job, runs)
        if numbers is None:
            raise RuntimeError(f"{job}: its files are gone from {runs}. Run the command again.")
        found.setdefault(job.name, []).append(numbers)
    every = [numbers for each in found.values() for numbers in each]
    head = {
        "figure": name,
        "command": settings.command(name),
        "hardware": _merged(every, "hardware"),
        "versions": _merged(every, "versions"),
        "date": max(numbers["date"] for numbers in every),
        "commit": _merged(every, "commit"),
        "settings": {
            "data": jobs[0].data,
            "steps": settings.steps,
            "seeds": len({job.seed for job in jobs}),
            "batch_size": settings.batch_size,
            "learning_rate": settings.learning_rate,
            "test_points": TEST_POINTS,
        },
    }
    pictures = [out / f"{name}.png"]
    with one_thread():
        if name == figures4_6.NAME:
            results = figures4_6.results(jobs, runs, out)
            pictures = [out / each["picture"] for each in results["models"].values()]
        else:
            module = figure2 if name == figure2.NAME else figure3
            results = module.results(found, (timed or {})["step_ms"])
            head["step_ms_hardware"] = (timed or {})["hardware"]
            module.draw(jobs, runs, results, pictures[0])
    for job in jobs:
        if job.seed == 0:
            own = job.identity()["model"]
            results["models"][job.name] = {"label": job.model.label, **own, **results["models"][job.name]}
    path = out / f"{name}.json"
    write_json(path, {**head, **results})
    return [path, *pictures]


def _merged(runs: Sequence[Mapping[str, Any]], key: str) -> str | None:
    """What all runs have, or each of what they have."""
    return "; ".join(sorted({str(run[key]) for run in runs if run[key]})) or None
