"""Training steps captured as CUDA graphs: small flows are bound by launches, and a graph has one.

A step of a flow is a few thousand kernels of some microseconds. A `GraphTrainer` captures it once and replays it, on a
stream of its own, so that several of them, in turn, fill a device that none of them could (`run_together`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from quarflow.logdet import RouletteLogDet
from quarflow.training import LOG_EVERY, Options, Rows, Trainer

if TYPE_CHECKING:
    from quarflow.flow import Flow

WARM_UP = 5  # steps without a graph: what is made at the first step must be there when one is captured
MOST_TERMS = 10  # of a series in a graph; a step that draws more runs without it


class GraphTrainer(Trainer):
    """A `Trainer` whose step is one CUDA graph.

    What changes from step to step is in tensors that are written before: the rows, the learning rate, the decay of the
    averages, and the weights of the series that `RouletteLogDet` draws on the host. The graph has `MOST_TERMS` terms,
    those that a draw leaves out weigh nothing.
    """

    def __init__(self, flow: Flow, train: Rows, validation: Rows | None, options: Options) -> None:
        device = train.x.device
        if device.type != "cuda":
            raise ValueError(f"train: expected data on a CUDA device to capture graphs; got {device}. Use Trainer.")
        super().__init__(flow, train, validation, options)
        self.stream = torch.cuda.Stream(device)
        for group in self.optimizer.param_groups:
            group["capturable"] = True
        self._place = torch.zeros(self.batch_size, dtype=torch.long, device=device)
        self._keep = torch.zeros((), device=device)
        self._draws = [m for m in flow.modules() if isinstance(m, RouletteLogDet)]
        self._graph: torch.cuda.CUDAGraph | None = None
        for m in self._draws:
            m.held = torch.zeros(MOST_TERMS, 1, dtype=train.x.dtype, device=device)

    def advance(self) -> None:
        """The next step of the run, queued on the stream of this trainer."""
        with torch.cuda.stream(self.stream):
            self._set_inputs()
            if not self._set_draws():
                held = [m.held for m in self._draws]
                for m in self._draws:
                    m.held = None
                self._body()
                for m, buffer in zip(self._draws, held, strict=True):
                    m.held = buffer
            elif self.step < WARM_UP:
                self._body()
            else:
                if self._graph is None:
                    self._capture()
                self._graph.replay()  # type: ignore[union-attr]
            self.step += 1
            if self.step % LOG_EVERY == 0:
                self.log()

    def _set_inputs(self) -> None:
        self.learning_rate.fill_(self._rate(self.step))
        self._place.copy_(self.rows(self.step))
        self._keep.fill_(1 - min(self.options.ema, (1 + self.step) / (10 + self.step)))

    def _set_draws(self) -> bool:
        """Draws the weights of every series; False if one has more terms than the graph."""
        if not self._draws:
            return True
        drawn = [m.draw(self.batch_size) for m in self._draws]
        if max(map(len, drawn)) > MOST_TERMS:
            return False
        padded = torch.stack([pad(w, (0, 0, 0, MOST_TERMS - len(w))) for w in drawn])
        for m, w in zip(self._draws, padded.to(self._keep.device, self.train.x.dtype).unbind(), strict=True):
            m.held.copy_(w)  # type: ignore[union-attr]
        return True

    def _body(self) -> None:
        self.update(self.train[self._place])
        difference = torch._foreach_sub(self.live, self.average)
        torch._foreach_mul_(difference, self._keep)
        torch._foreach_add_(self.average, difference)

    def _apply(self, grads: list[Tensor], scale: Tensor) -> None:
        if self.fused:
            return super()._apply(grads, scale)
        # Without a kernel that stays idle: a gradient that is not finite counts as zero. `look` ends the run.
        for g in grads:
            g.nan_to_num_(0.0, 0.0, 0.0)
        torch._foreach_div_(grads, scale.nan_to_num(1.0))
        self.optimizer.step()

    def _capture(self) -> None:
        self.optimizer.zero_grad()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self._body()
        self._graph = graph

    def finish(self) -> None:
        """As `Trainer.finish`, when the stream has run dry; the flow draws for itself again."""
        self.stream.synchronize()
        for m in self._draws:
            m.held = None
        super().finish()


def run_together(trainers: Sequence[GraphTrainer], show: Callable[[int], object] = lambda step: None) -> None:
    """Drives trainers of equally many steps in turn, each on its stream, to the end."""
    steps = {t.options.max_steps for t in trainers}
    if len(steps) != 1 or None in steps:
        raise ValueError(f"trainers: expected the same max_steps in all; got {sorted(map(str, steps))}.")
    for step in range(next(iter(steps)) or 0):
        for trainer in trainers:
            trainer.advance()
        show(step + 1)
    for trainer in trainers:
        with torch.cuda.stream(trainer.stream):
            trainer.log()
        trainer.history.stopped = "max_steps"
        trainer.finish()
