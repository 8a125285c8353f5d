"""Weights on huge pages are the same weights, and the system was asked for such pages."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from outrider.models import package, pages

linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE") or not Path("/proc/self/smaps").exists(), reason="no huge pages to ask for here")


def some() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    wide = torch.randn(300, 70)
    return {
        "a": wide, "a again": wide, "part of a": wide[:7], "turned": wide.T, "odd": torch.randn(13).bfloat16(), "whole": torch.arange(5),
        "none": torch.empty(0, 4), "scalar": torch.tensor(2.5),
    }  # fmt: skip


def flags_of(address: int) -> str:
    """What the kernel was told of the mapping that holds an address."""
    for found in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, last = (int(x, 16) for x in found.split(" ", 1)[0].split("-"))
        if first <= address < last:
            return next(line for line in found.splitlines() if line.startswith("VmFlags:"))
    raise AssertionError("an address of no mapping")


def test_copies_are_equal_and_aligned_and_what_was_one_stays_one() -> None:
    before, after = some(), pages.together(some())
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    assert after["a"].data_ptr() == after["a again"].data_ptr() and not after["turned"].is_contiguous()


@linux
def test_no_two_copies_overlap() -> None:
    before, after = some(), pages.together(some())
    after["a"][0, 0] = 7.0
    assert after["a again"][0, 0] == 7.0 and after["part of a"][0, 0] == before["a"][0, 0]


@linux
def test_the_system_is_asked_for_huge_pages() -> None:
    big = pages.together({"big": torch.ones(3 << 20), "small": torch.ones(3)})
    assert big["big"].data_ptr() % pages.HUGE == 0 and big["small"].data_ptr() % pages.LINE == 0
    flags = flags_of(big["big"].data_ptr()).split()
    assert "hg" in flags and "sh" not in flags, "shared memory has rules of its own"


@linux
def test_the_memory_goes_with_the_last_tensor() -> None:
    moved = pages.together({"a": torch.ones(8 << 20), "b": torch.ones(9)})
    address, last = moved["a"].data_ptr(), moved["b"]
    del moved
    assert "hg" in flags_of(address).split() and float(last.sum()) == 9.0
    del last
    try:
        flags = flags_of(address)
    except AssertionError:
        flags = ""  # nothing is there now
    assert "hg" not in flags.split()


def test_a_system_without_them_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    before = some()
    assert all(after is before[name] for name, after in pages.together(before).items())
    assert pages.together({}) == {}


@pytest.mark.parametrize("change", [lambda w: w + 1, lambda w: w[:2], lambda w: w.t().contiguous().t(), lambda w: w.double()])
def test_weights_that_differ_in_anything_are_not_shared(change):
    weight = torch.arange(12.0).view(3, 4)
    assert package._same(weight.clone(), weight) is weight and package._same(weight, None) is weight
    other = change(weight)
    assert package._same(other, weight) is other
