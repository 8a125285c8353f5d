"""Known bugs can be put back: the text of each is in the package, and the test that guards it in the suite."""

import tomllib
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent


@cache
def text_of(file: str) -> str:
    return (HERE.parent / file).read_text("utf-8")


def test_every_known_bug_can_be_put_back() -> None:
    for list_ in sorted((HERE / "mutants").glob("*.toml")):
        for bug in tomllib.loads(list_.read_text("utf-8"))["mutant"]:
            file, _, test = bug["test"].partition("::")
            assert text_of(bug["file"]).count(bug["old"]) == 1, f"{list_.name}: {bug['pitfall']}, {bug['about']}: its text is not in {bug['file']}"
            assert bug["old"] != bug["new"] and (f"def {test.split('[')[0]}(" if test else "def test_") in text_of(file), (
                f"{list_.name}: {bug['pitfall']}: no {bug['test']}"
            )
