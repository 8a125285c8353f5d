"""One thread per test process: several run side by side, and small products are slower on many threads. Nothing is
built in the background and nothing is measured, unless a test says so: texts must not hang on when a build was done."""

import pytest
import torch

from outrider.measure import machine
from outrider.models import compiled

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(compiled, "start_builder", lambda recipe, folder: None)
    monkeypatch.setattr(machine, "fastest_dtype", lambda candidates: "float32")
