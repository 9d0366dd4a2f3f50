"""What holds for every test: one thread each (tests run side by side), no deadline, repeatable draws."""

import os
import signal

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels for GPUs run all the same; to be said before triton is imported

# A shell that runs the tests in the background has Ctrl-C ignored, and its children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("quarflow", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("quarflow")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
