"""Jobs side by side on one machine, each on cores of its own, so that none slows another."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, TypeVar

import torch

J = TypeVar("J")
R = TypeVar("R")
ROOM = 1.2  # a job is taken to last this much longer than its training


def cores_of(lanes: int, cores: int) -> list[list[int]]:
    """Cores for each lane, ``cores`` of them, of those that this process may use.

    >>> [len(lane) for lane in cores_of(1, 1)]
    [1]
    """
    if not hasattr(os, "sched_getaffinity"):
        raise SystemExit("--lanes: expected a system that gives processes cores of their own, such as Linux.")
    there = sorted(os.sched_getaffinity(0))
    if lanes < 1 or cores < 1 or lanes * cores > len(there):
        raise SystemExit(
            f"--lanes {lanes} --cores {cores}: expected at least one of each and no more cores in all than the "
            f"{len(there)} of this machine. Take fewer."
        )
    return [there[i * cores : (i + 1) * cores] for i in range(lanes)]


def _enter(waiting: Any) -> None:
    """A process takes the cores of a lane that no other has."""
    cores = waiting.get()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def side_by_side(
    work: Callable[[J], R], jobs: Sequence[J], lanes: int, cores: int, seconds: float, minutes: float = math.inf
) -> Iterator[tuple[J, R]]:
    """Each job with its result, as they come; ``work`` is a function of a module, run in one of ``lanes`` processes.

    Jobs start in order. None starts that would not be done after ``minutes``, at ``seconds`` of training each. A job
    that fails does not stop the others, unless it is for want of a file; the command ends with an error.

    >>> sorted(side_by_side(abs, [-1, 2, -3], lanes=1, cores=1, seconds=0))
    [(-3, 3), (-1, 1), (2, 2)]
    """
    places = cores_of(lanes, cores)
    if not jobs:
        return
    began, left, failed = time.monotonic(), list(reversed(jobs)), 0
    # Fresh processes: threads of torch do not survive a fork. What other libraries do in parallel follows this.
    os.environ["OMP_NUM_THREADS"] = str(cores)
    context = multiprocessing.get_context("spawn")
    waiting = context.Queue()
    for place in places:
        waiting.put(place)
    running: dict[Future[R], J] = {}
    with ProcessPoolExecutor(lanes, context, _enter, (waiting,)) as pool:
        while True:
            while left and len(running) < lanes and time.monotonic() - began + ROOM * seconds <= 60 * minutes:
                job = left.pop()
                running[pool.submit(work, job)] = job
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, error = running.pop(future), future.exception()
                if error is None:
                    yield job, future.result()
                elif isinstance(error, OSError):
                    raise error
                else:
                    failed += 1
                    print(f"{job}: {error!r}", file=sys.stderr, flush=True)
    if left:
        print(f"Out of time: {len(left)} jobs are left. The same command goes on.")
    if failed:
        raise SystemExit(f"{failed} jobs failed: see above. The same command tries them again.")
