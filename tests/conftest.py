"""One thread per test process: several run side by side, and small products are slower on many threads. Nothing is
built in the background, nothing is measured or swept, unless a test says so: texts must not hang on when a build was done."""

import os
import tempfile

import pytest
import torch

os.environ.setdefault("OUTRIDER_HOST", "python")  # tests put parts of their own in the place of the house's

from outrider.measure import machine
from outrider.models import compiled
from outrider.runtime import profiler
from outrider.runtime.native import host

torch.set_num_threads(1)
os.environ["OUTRIDER_CACHE"] = tempfile.mkdtemp(prefix="outrider-tests-")


assert host.tier == ("python:off" if os.environ["OUTRIDER_HOST"] == "python" else "native"), host.tier


@pytest.fixture(autouse=True, scope="session")
def _quiet_machine():
    with pytest.MonkeyPatch.context() as patch:
        started = "start" if host.tier == "native" else "start_builder"  # machine code asks nobody for its own functions
        patch.setattr(compiled, started, lambda *_, **__: None)
        patch.setattr(machine, "fastest_dtype", lambda candidates: "float32")
        patch.setattr(profiler, "PATIENCE", 0.0)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of packages come last: these are built meanwhile, and no worker waits for them while there is something else to do."""
    items.sort(key=lambda item: "built" in item.fixturenames)
