"""Many jobs, some at a time, each in a process of its own; what is finished is kept, and what was cut goes on.

In the folder of the runs a job has ``STEM.json``, its settings and, once it is finished, its numbers; ``STEM.qf``,
the trained flow; and while it is not finished ``STEM.training``, from which it goes on.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from experiments.synthetic import Interrupted, Job, one_thread, read_json, train, train_together
from quarflow.training import Trainer

# What is told about a job: "started", "step" with its number, and in the end "finished" with its numbers, "failed"
# with the reason, or "stopped".
Tell = Callable[[Job, str, Any], None]
GRACE = 60.0  # seconds for jobs to write their state after an interrupt


class Mismatch(ValueError):
    """The folder holds runs of other settings."""


def finished(job: Job, folder: Path) -> dict[str, Any] | None:
    """The numbers of a job, or None if it still has to run; `Mismatch` if its files are of other settings."""
    found = read_json(folder / f"{job.stem}.json")
    if found is None:
        return None
    theirs, ours = found["job"], job.identity()
    if theirs != ours:
        differ = [key for key in ours if theirs.get(key) != ours[key]]
        was = "; ".join(f"{key} {theirs.get(key)!r:.60}, now {ours[key]!r:.60}" for key in differ)
        raise Mismatch(
            f"{folder / job.stem}.json is of other settings: {was}. Give another folder with --out, or train "
            "anew with --fresh."
        )
    return found if "seed" in found and (folder / f"{job.stem}.qf").exists() else None


def forget(job: Job, folder: Path) -> None:
    """Removes what is there of a job."""
    for suffix in ("json", "qf", "training"):
        (folder / f"{job.stem}.{suffix}").unlink(missing_ok=True)


def run(
    jobs: Sequence[Job],
    folder: Path,
    workers: int = 1,
    tell: Tell = lambda job, state, value: None,
    cost: Mapping[str, float] | None = None,
) -> list[Job]:
    """Runs the jobs that are not finished, and returns those that failed.

    Args:
        folder: of their files.
        workers: how many at a time; one runs here, more in processes of their own, with one thread each.
        tell: is called with a job, its state, and a value.
        cost: of jobs, by figure and name: the longest go first, so that none is waited for in the end.

    Ctrl-C ends it with a `KeyboardInterrupt`, after the jobs in hand have written their state.
    """
    folder.mkdir(parents=True, exist_ok=True)
    todo = [job for job in jobs if finished(job, folder) is None]
    todo.sort(key=lambda job: -(cost or {}).get(f"{job.figure} {job.name}", 0) * job.steps)
    if todo and torch.device(todo[0].device).type == "cuda":
        return _on_one_device(todo, folder, tell)
    if workers > 1:
        return _side_by_side(todo, folder, workers, tell)
    failed = []
    for job in todo:
        tell(job, "started", 0)
        try:
            with one_thread():
                numbers = train(job, folder, _throttled(partial(tell, job, "step")))
        except (ArithmeticError, ValueError, RuntimeError, OSError) as error:
            failed.append(job)
            tell(job, "failed", _text(error))
        else:
            tell(job, "finished", numbers)
    return failed


def _on_one_device(todo: Sequence[Job], folder: Path, tell: Tell) -> list[Job]:
    """All side by side: see `quarflow.graph_training`."""
    ended: dict[str, str] = {}

    def listen(job: Job, state: str, value: Any) -> None:
        if state != "step":
            ended[job.stem] = state
        tell(job, state, _text(value) if state == "failed" else value)

    for job in todo:
        tell(job, "started", 0)
    try:
        train_together(todo, folder, listen)
    except (ArithmeticError, ValueError, RuntimeError, OSError) as error:
        for job in todo:
            if job.stem not in ended:
                listen(job, "failed", error)
    return [job for job in todo if ended[job.stem] == "failed"]


def _throttled(report: Callable[[int], object], seconds: float = 0.25) -> Callable[[Trainer], None]:
    last = 0.0

    def show(trainer: Trainer) -> None:
        nonlocal last
        if time.monotonic() - last > seconds:
            last = time.monotonic()
            report(trainer.step)

    return show


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _side_by_side(todo: Sequence[Job], folder: Path, workers: int, tell: Tell) -> list[Job]:
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads or a GPU is no good
    waiting, failed = list(todo), list[Job]()
    running: dict[Connection, tuple[Job, BaseProcess]] = {}

    def listen(timeout: float | None = None) -> None:
        ready = wait(list(running), timeout)
        for connection in [c for c in running if c in ready]:
            job, process = running[connection]
            try:
                state, value = connection.recv()
            except (EOFError, OSError):
                process.join()
                state, value = "failed", f"its process ended with exit code {process.exitcode}"
            tell(job, state, value)
            if state != "step":
                process.join()
                del running[connection]
                if state != "finished":
                    failed.append(job)

    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                ours, theirs = context.Pipe()
                running[ours] = job, context.Process(target=_work, args=(job, folder, theirs), daemon=True)
                running[ours][1].start()
                theirs.close()  # or its end would not be noticed
                tell(job, "started", 0)
            listen()
    except KeyboardInterrupt:
        for connection in running:
            with suppress(OSError):
                connection.send("stop")
        until = time.monotonic() + GRACE
        while running and time.monotonic() < until:
            listen(1.0)
        raise
    finally:
        for _, process in running.values():
            process.terminate()
    return failed


def _work(job: Job, folder: Path, connection: Connection) -> None:
    """A process: messages to ``connection``; any message from there, or its end, says stop."""
    # Ctrl-C goes to the whole group of processes: where `fit` does not take it, the parent decides.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    torch.set_num_threads(1)

    def report(step: int) -> None:
        if connection.poll():
            signal.raise_signal(signal.SIGINT)
        else:
            connection.send(("step", step))

    message: tuple[str, Any]
    try:
        message = "finished", train(job, folder, _throttled(report))
    except Interrupted:
        message = "stopped", None
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent tells it)
        message = "failed", _text(error)
    with suppress(OSError):
        connection.send(message)
