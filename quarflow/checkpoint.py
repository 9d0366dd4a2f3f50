"""One file per model: its configuration as JSON beside its tensors, as safetensors. Loading executes nothing.

The metadata of a model file:

====================  ==================================================================
``format``            "quarflow"
``format_version``    "1"; a file of a newer version is refused
``kind``              "flow"; the state of an unfinished `quarflow.fit` has "training"
``config``            JSON of ``flow.config.to_dict()``
``notes``             JSON of ``flow.notes``, where there are some: how it was fitted
``dtype``             of the weights, such as "float64"
``quarflow_version``  and ``torch_version``: what wrote it, for people to read
====================  ==================================================================
"""

from __future__ import annotations

import glob
import json
import os
import re
import secrets
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


def save(flow: Flow, path: str | os.PathLike[str], shard_size: int | str | None = None) -> None:
    """Writes ``flow`` to one file, all or nothing: if it fails, a file that was there before is intact.

    With a ``shard_size``, bytes or such as "16MiB", the tensors go into files of at most that size beside it, and
    ``path`` becomes an index of them, which `load` takes likewise.

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
            **({"notes": to_json(flow.notes)} if flow.notes else {}),
        },
        shard_size,
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
        notes = dict(json.loads(metadata.get("notes", "{}")))
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: its header is damaged: {error!r}. Use another copy of the file."
        ) from error
    # A number too large would have the model built larger than memory before its tensors are seen not to fit.
    if largest > sum(map(os.path.getsize, [path, *_pieces(path)])):
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
    flow.notes = notes
    return flow.to(device).eval()


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    shard_size: int | str | None = None,
) -> None:
    """Writes a safetensors file, all or nothing: after an ``OSError`` what was there before is intact.

    With a ``shard_size`` it is several such files and an index, JSON as in libraries of large models::

        {"metadata": {...}, "weight_map": {"name of a tensor": "PATH-3f2a90c1-00001-of-00004.safetensors", ...}}

    The files of an index have names of their own: only when all are written does the new index take the place of the
    old one, and then the old files go. A tensor larger than ``shard_size`` has a file to itself.
    """
    from quarflow import __version__

    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"path: the folder {target.parent} does not exist. Create it first.")
    about = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "quarflow_version": __version__}
    about |= dict(metadata)
    shards = [dict(tensors)] if shard_size is None else _shards(tensors, size_in_bytes(shard_size))
    tag, written = secrets.token_hex(4), list[Path]()
    names = [f"{target.name}-{tag}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    try:
        if shard_size is None:
            write_file(target, _serialised(tensors, about))
        else:
            for name, shard in zip(names, shards, strict=True):
                written.append(target.with_name(name))
                write_file(written[-1], _serialised(shard, {"format": FORMAT, "format_version": str(FORMAT_VERSION)}))
            where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
            write_file(target, json.dumps({"metadata": about, "weight_map": where}, indent=1).encode())
    except BaseException as error:
        for piece in written:
            piece.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        kept = (
            "the file that was there before is intact" if target.exists() else "no part of it was left behind"
        )
        size = sum(t.nbytes for t in tensors.values())
        message = f"could not write {size:,} bytes: {error.strerror or error}; {kept}"
        raise OSError(error.errno, message, str(path)) from error
    for old in target.parent.glob(f"{glob.escape(target.name)}-????????-?????-of-?????.safetensors"):
        if old not in written:
            old.unlink(missing_ok=True)


def _shards(tensors: Mapping[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """The tensors in their order, in as many groups as files of ``size`` bytes take."""
    shards, room = [dict[str, Tensor]()], size - 512
    for name, t in tensors.items():
        needed = t.numel() * t.element_size() + 2 * len(name) + 128  # with its part of the header
        if needed > room and shards[-1]:
            shards.append({})
            room = size - 512
        shards[-1][name] = t
        room -= needed
    return shards


def _serialised(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    from safetensors.torch import save as serialise

    # Tensors may share memory (tied weights): the file holds each in full.
    whole = {
        name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()
    }
    return serialise(whole, dict(metadata))


def write_file(target: Path, data: bytes) -> None:
    """Writes a file, all or nothing."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def size_in_bytes(size: int | str) -> int:
    """A size such as "16MiB", or bytes.

    >>> size_in_bytes("16MiB"), size_in_bytes("1.5 GB"), size_in_bytes(4096)
    (16777216, 1500000000, 4096)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?)?B?\s*", str(size))
    units = {"K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    value = int(float(found[1]) * units.get(found[2], 1)) if found else 0
    if isinstance(size, bool) or value < 1024:
        raise ValueError(f"shard_size: expected a size of 1KiB or more, such as 16MiB; got {size!r}.")
    return value


def read_tensors(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors (on the CPU) and metadata of a file from `write_tensors` whose metadata says ``kind``."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: there is no such file.")
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: expected a file; got a folder or a device.")
    if not _is_index(path):
        tensors, metadata = _read(path)
        _check_metadata(path, metadata, kind)
        return tensors, metadata
    metadata, where = _index(path)
    _check_metadata(path, metadata, kind)
    pieces = _pieces(path)
    missing = [piece.name for piece in pieces if not piece.is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of its {len(pieces)} files are missing: {', '.join(missing[:3])}"
            f"{' and more' if len(missing) > 3 else ''}. Put them into the same folder."
        )
    tensors = {}
    for piece in pieces:
        tensors |= _read(piece)[0]
    if set(tensors) != set(where):
        raise CheckpointError(f"{path}: its files do not hold the tensors that it names. Use another copy of them.")
    return tensors, metadata


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of one safetensors file."""
    from safetensors import SafetensorError, safe_open

    with open(path, "rb") as file:
        head = file.read(9)
    # A header of n bytes: n in 8 bytes, then JSON.
    if len(head) == 9 and head[8:] != b"{":
        raise CheckpointError(f"{path}: not safetensors, so not a quarflow file. {MADE_BY}")
    try:
        # The reader checks the header's length, and every offset and shape against the size of the file.
        with safe_open(path, framework="pt") as opened:
            names = opened.keys()
            return {name: opened.get_tensor(name) for name in names}, opened.metadata() or {}
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: truncated or damaged, {os.path.getsize(path):,} bytes: {error}. Use another copy of it."
        ) from error


def _is_index(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as JSON; one of safetensors begins with a multiple of eight."""
    with open(path, "rb") as file:
        return file.read(1) == b"{"


def _index(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Metadata, and the file of each tensor, of an index."""
    try:
        found = json.loads(Path(path).read_bytes())
        metadata, where = found["metadata"], found["weight_map"]
        # Names of files in the same folder, and of no others.
        if all(isinstance(v, str) for v in [*metadata.values(), *where.values()]) and all(
            name == Path(name).name and name not in ("", ".", "..") for name in where.values()
        ):
            return dict(metadata), dict(where)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise CheckpointError(f"{path}: JSON, but no index of a quarflow file. {MADE_BY}")


def _pieces(path: str | os.PathLike[str]) -> list[Path]:
    """The files that an index names; none for a file that holds its tensors itself."""
    names = dict.fromkeys(_index(path)[1].values()) if _is_index(path) else {}
    return [Path(os.path.realpath(path)).with_name(name) for name in names]


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
