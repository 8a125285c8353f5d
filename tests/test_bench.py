"""The arithmetic of the benchmark: paired ratios, geometric means, who is compared with whom."""

import pytest

from outrider.bench import prompts
from outrider.bench.run import CONTENDERS, Row, markdown, summary


def rows(category: str, prompt: str, seconds: dict[str, float], other: str | None = None) -> list[Row]:
    """One prompt written by all; `other` writes another text."""
    return [
        Row(prompt, category, name, [1, 2, 3 if name != other else 4], "length", seconds.get(name, 1.0), 2.0, None if name == "plain" else 0.5)
        for name in CONTENDERS
    ]


def test_ratios_are_paired_by_prompt_and_averaged_geometrically():
    made = [r for c in prompts.CATEGORIES for r in rows(c, f"{c}-a", {"plain": 4.0, "lookup": 1.0})]
    made += rows("story", "story-b", {"plain": 1.0, "lookup": 1.0}, other="model")
    table = {(r["category"], r["contender"]): r for r in summary(made)}
    story = table["story", "lookup"]
    assert story["ratio"] == pytest.approx(2.0) and (story["worst"], story["best"]) == (1.0, 4.0)
    assert table["code", "lookup"]["ratio"] == pytest.approx(4.0)
    assert table["all", "plain"]["ratio"] == 1.0 and table["all", "plain"]["acceptance_rate"] is None
    assert table["story", "model"]["identical"] == 1 and table["all", "model"]["identical"] == 6
    assert table["story", "lookup"]["tokens_per_second"] == pytest.approx(3.0)
    text = markdown({"summary": summary(made)})
    assert text.splitlines()[0].count("|") == text.splitlines()[1].count("|") == text.splitlines()[-1].count("|")
