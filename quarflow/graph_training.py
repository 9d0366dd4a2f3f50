"""Training steps captured as CUDA graphs: small flows are bound by launches, and a graph has one.

A step of a flow is a few thousand kernels of some microseconds. A `GraphTrainer` captures it once and replays it, on a
stream of its own, so that several of them, in turn, fill a device that none of them could (`run_together`). On a CPU
it takes the same steps, one after the other, without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from quarflow.checks import is_out_of_memory
from quarflow.logdet import RouletteLogDet
from quarflow.training import Options, Rows, Trainer, TrainingDiverged

if TYPE_CHECKING:
    from quarflow.flow import Flow

WARM_UP = 5  # first steps, without a graph: what they make must be there when one is captured
SIZES = (7, 10)  # terms of the series in a graph, one graph for each; a step that draws more runs without one


class GraphTrainer(Trainer):
    """A `Trainer` whose step is one CUDA graph.

    What changes from step to step is in tensors that are written before: the rows, the learning rate, the decay of the
    averages, and the weights of the series that each `RouletteLogDet` draws on the host. (One draw for all blocks would
    be shorter and unbiased too; but what it adds once in many steps is then so much that clipping takes most of it.) A
    graph has some more terms than a draw; those weigh nothing.
    """

    def __init__(
        self,
        flow: Flow,
        train: Rows,
        validation: Rows | None,
        options: Options,
        distributed: bool = False,
    ) -> None:
        super().__init__(flow, train, validation, options, distributed)
        device = train.x.device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))
        for group in self.optimizer.param_groups:
            group["capturable"] = self.stream is not None
        self._draws = [m for m in flow.modules() if isinstance(m, RouletteLogDet)]
        like = flow.base.anchor
        self._weights = {n: like.new_zeros(len(self._draws), n, 1) for n in SIZES}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._plain = WARM_UP  # steps to go without a graph, also in a run that goes on

    def queued(self) -> AbstractContextManager[object]:
        """Within it, work goes to the stream of this trainer."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _body(self) -> None:
        size = self._set_draws()
        if size is None or self._plain or self.stream is None:
            super()._body()
            self._plain = max(0, self._plain - 1)
        else:
            if size not in self._graphs:
                self._capture(size)
            self._graphs[size].replay()

    def _set_draws(self) -> int | None:
        """Draws the weights of the series: the size of the graph that has room for them, if there is one."""
        if not self._draws:
            return SIZES[0]
        drawn = [m.draw(self.batch_size // self.processes) for m in self._draws]
        longest = max(map(len, drawn))
        size = next((n for n in SIZES if n >= longest), None)
        if size is None or any(m.per_row for m in self._draws):
            held, size = [w.to(self._keep.device, self._weights[SIZES[0]].dtype) for w in drawn], None
        else:
            padded = torch.stack([pad(w, (0, 0, 0, size - len(w))) for w in drawn])
            held = list(self._weights[size].copy_(padded))
        for m, weights in zip(self._draws, held, strict=True):
            m.held = weights
        return size

    def _apply(self, grads: list[Tensor], scale: Tensor) -> None:
        if self.fused:
            return super()._apply(grads, scale)
        # Without a kernel that stays idle: a gradient that is not finite counts as zero. `look` ends the run.
        for g in grads:
            g.nan_to_num_(0.0, 0.0, 0.0)
        torch._foreach_div_(grads, scale.nan_to_num(1.0))
        self.optimizer.step()

    def _capture(self, size: int) -> None:
        self.optimizer.zero_grad()
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        # The threads of NCCL look at the device meanwhile, which a strict capture takes for a mistake.
        mode = "global" if self.processes == 1 else "thread_local"
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode=mode):
                super()._body()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            why = str(error).partition("\n")[0]
            raise ValueError(
                f"graph: a step of this flow cannot be captured ({why}): something in it waits for the device. Use "
                "graph=False (run.graph=false on the command line)."
            ) from error
        self._graphs[size] = graph

    def finish(self) -> None:
        """As `Trainer.finish`, when the stream has run dry; the flow draws for itself again."""
        if self.stream is not None:
            self.stream.synchronize()
        for m in self._draws:
            m.held = None
        super().finish()


def run_together(
    trainers: Sequence[GraphTrainer], show: Callable[[], object] = lambda: None
) -> dict[GraphTrainer, TrainingDiverged]:
    """Drives trainers in turn, each on its stream, to their ``max_steps`` or ``max_seconds``; returns what diverged.

    ``show`` is called after each round of steps.
    """
    diverged: dict[GraphTrainer, TrainingDiverged] = {}
    running = list(trainers)
    while running:
        for trainer in list(running):
            history, options = trainer.history, trainer.options
            try:
                if options.max_steps is not None and trainer.step >= options.max_steps:
                    history.stopped = "max_steps"
                elif options.max_seconds is not None and trainer.seconds >= options.max_seconds:
                    history.stopped = "max_seconds"
                else:
                    trainer.advance()
                if history.stopped is not None:
                    with trainer.queued():
                        trainer.log()
                        trainer.evaluate()
            except TrainingDiverged as error:
                diverged[trainer] = error
            if history.stopped is not None:
                trainer.finish()
                running.remove(trainer)
        show()
    return diverged
