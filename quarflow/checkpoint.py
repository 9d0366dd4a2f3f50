"""One file per model: its configuration as JSON beside its tensors, as safetensors. Loading executes nothing.

The metadata of a model file:

====================  ==================================================================
``format``            "quarflow"
``format_version``    "1"; a file of a newer version is refused
``kind``              "flow"; the state of an unfinished `quarflow.fit` has "training"
``config``            JSON of ``flow.config.to_dict()``
``dtype``             of the weights, such as "float64"
``quarflow_version``  and ``torch_version``: what wrote it, for people to read
====================  ==================================================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quarflow.flow import Flow

FORMAT = "quarflow"
FORMAT_VERSION = 1
MADE_BY = "Load a file made by quarflow.save."
DTYPES = {
    str(t).removeprefix("torch."): t for t in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


class CheckpointError(ValueError):
    """A file that cannot be what it is asked to be; the message says why, and what to do."""


def save(flow: Flow, path: str | os.PathLike[str]) -> None:
    """Writes ``flow`` to one file, all or nothing: if it fails, a file that was there before is intact.

    >>> import tempfile, quarflow as qf
    >>> flow = qf.models.quar(features=2, blocks=2, hidden=(4,))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     qf.save(flow, f"{folder}/m.qf")
    ...     same = qf.load(f"{folder}/m.qf")
    >>> x = torch.randn(5, 2)
    >>> torch.equal(flow.log_prob(x), same.log_prob(x))
    True
    """
    flow = getattr(flow, "_orig_mod", flow)  # what torch.compile wraps
    if flow.config is None:
        raise ValueError(
            "flow: expected a flow from quarflow.models, whose configuration goes into the file; got one put "
            "together by hand. Use safetensors.torch.save_model, and load_model into one made the same way."
        )
    state = flow.state_dict()
    # A file that could not be loaded would be found out about too late.
    problem = _difference(_layout(state), _layout(_build(flow.config.to_dict(), _dtype(flow)).state_dict()))
    if problem:
        raise ValueError(
            f"flow: its tensors are not those that its configuration builds: {problem}. If the flow was "
            "changed after it was built, use safetensors.torch.save_model."
        )
    write_tensors(
        path,
        state,
        {
            "kind": "flow",
            "config": to_json(flow.config.to_dict()),
            "dtype": str(_dtype(flow)).removeprefix("torch."),
            "torch_version": torch.__version__,
        },
    )


def load(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Flow:
    """The flow in a file from `save`, with the same ``log_prob`` to the last bit; in ``eval()`` mode.

    Raises `CheckpointError`, a ``ValueError``, if the file is truncated, foreign, newer or inconsistent.
    """
    tensors, metadata = read_tensors(path, kind="flow")
    try:
        config = json.loads(metadata["config"])
        dtype = DTYPES[metadata["dtype"]]
        largest = _largest(config)
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: its header is damaged: {error!r}. Use another copy of the file."
        ) from error
    # A number too large would have the model built larger than memory before its tensors are seen not to fit.
    if largest > os.path.getsize(path):
        raise CheckpointError(
            f"{path}: its configuration has a size of {largest:,}, more than the file has bytes. Use another "
            "copy of the file."
        )
    try:
        flow = _build(config, dtype)
    except (ValueError, TypeError, RuntimeError, MemoryError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: its configuration cannot be built here: {error} (written by quarflow "
            f"{metadata.get('quarflow_version', 'unknown')}). Load it with that version."
        ) from error
    problem = _difference(_layout(tensors), _layout(flow.state_dict()))
    if problem:
        raise CheckpointError(
            f"{path}: its tensors do not fit its configuration: {problem}. Use another copy of the file."
        )
    flow.load_state_dict(tensors)
    return flow.to(device).eval()


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file, all or nothing: after an ``OSError`` the file before it is intact."""
    from safetensors.torch import save as serialise

    from quarflow import __version__

    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"path: the folder {target.parent} does not exist. Create it first.")
    # Tensors may share memory (tied weights): the file holds each in full.
    whole = {
        name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()
    }
    about = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "quarflow_version": __version__}
    data = serialise(whole, about | dict(metadata))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        kept = (
            "the file that was there before is intact" if target.exists() else "no part of it was left behind"
        )
        message = f"could not write {len(data):,} bytes: {error.strerror or error}; {kept}"
        raise OSError(error.errno, message, str(path)) from error


def read_tensors(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors (on the CPU) and metadata of a file from `write_tensors` whose metadata says ``kind``."""
    from safetensors import SafetensorError, safe_open

    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: there is no such file.")
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: expected a file; got a folder or a device.")
    with open(path, "rb") as file:
        head = file.read(9)
    # A header of n bytes: n in 8 bytes, then JSON.
    if len(head) == 9 and head[8:] != b"{":
        raise CheckpointError(f"{path}: not safetensors, so not a quarflow file. {MADE_BY}")
    try:
        # The reader checks the header's length, and every offset and shape against the size of the file.
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            _check_metadata(path, metadata, kind)
            names = opened.keys()
            return {name: opened.get_tensor(name) for name in names}, metadata
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: truncated or damaged, {os.path.getsize(path):,} bytes: {error}. Use another copy of it."
        ) from error


def to_json(value: object) -> str:
    """JSON, also of the numbers that numpy and torch make."""
    return json.dumps(value, default=lambda number: number.item())


def _check_metadata(path: str | os.PathLike[str], metadata: Mapping[str, str], kind: str) -> None:
    from quarflow import __version__

    found = metadata.get("format_version", "")
    if metadata.get("format") != FORMAT or not (found.isdecimal() and len(found) < 9):
        raise CheckpointError(f"{path}: a safetensors file, but not a quarflow file. {MADE_BY}")
    if int(found) > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: expected a format version <= {FORMAT_VERSION}; got {found}, written by quarflow "
            f"{metadata.get('quarflow_version', 'unknown')}, newer than this {__version__}. Update quarflow."
        )
    if metadata.get("kind") != kind:
        remedy = {
            "flow": "Use quarflow.load for it.",
            "training": "Continue it with quarflow.fit(..., checkpoint=path, resume=True).",
        }.get(metadata.get("kind", ""), "Use another copy of the file.")
        raise CheckpointError(f"{path}: expected the kind {kind!r}; got {metadata.get('kind')!r}. {remedy}")


def _build(config: object, dtype: torch.dtype) -> Flow:
    from quarflow import models

    if not isinstance(config, dict):
        raise ValueError(f"config: expected a JSON object; got {type(config).__name__}.")
    # Starting weights are random numbers, and are overwritten: the caller's generator must not notice.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        flow = models.from_dict(config).build()
    return flow if _dtype(flow) == dtype else flow.to(dtype)


def _largest(config: object) -> int:
    """The largest integer in a configuration."""
    if isinstance(config, (dict, list)):
        return max(map(_largest, config.values() if isinstance(config, dict) else config), default=0)
    return config if isinstance(config, int) else 0


def _dtype(flow: Flow) -> torch.dtype:
    """Of the first floating tensor of the flow."""
    return next(t.dtype for t in flow.state_dict().values() if t.is_floating_point())


Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _layout(tensors: Mapping[str, Tensor]) -> Layout:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _difference(found: Layout, expected: Layout) -> str:
    """What differs, in words; empty if nothing does."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is not known" for name in found if name not in expected]
    problems += [
        f"{name} is {found[name][1]} {found[name][0]}, expected {want[1]} {want[0]}"
        for name, want in expected.items()
        if name in found and found[name] != want
    ]
    return "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
