"""The command line: what it prints, its exit codes, and that its options arrive (G5)."""

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import tiny_folders

from outrider import cli, reference
from outrider.bench import demo
from outrider.runtime.door import Runtime


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture
def outrider(monkeypatch, capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def call(*words: object, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outrider", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        try:
            cli.main()
            code = 0
        except SystemExit as done:
            code = int(done.code or 0)
        return code, *capsys.readouterr()

    return call


def test_json_is_the_last_line_and_the_options_arrive(outrider, folders):
    code, out, _ = outrider(
        "run", "the quick", "--target", folders["target"], "--draft", folders["draft"], "--depth", 3, "--max-tokens", 20,
        "--temperature", 0.8, "--seed", 4, "--logprobs", 2, "--json",
    )  # fmt: skip
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    assert found["stats"]["drafted"] > 0, "the draft was never asked"
    assert max(found["stats"]["per_step_drafted"]) == 3
    assert len(found["tokens"]) == found["usage"]["completion_tokens"] == len(found["origins"]) == len(found["logprobs"]) == 20
    again = json.loads(outrider("run", "the quick", "--target", folders["target"], "--drafters", "off", "--max-tokens", 20,
                                "--temperature", 0.8, "--seed", 4, "--json")[1])  # fmt: skip
    assert again["tokens"] == found["tokens"] and again["stats"]["drafted"] == 0


def test_stream_prints_the_text_of_a_file_and_of_standard_input(outrider, folders, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("the lazy dog")
    how = ("--target", folders["target"], "--max-tokens", 12)
    text = outrider("run", file, *how)[1]
    assert text.strip()
    assert outrider("run", "-", *how, stdin=b"the lazy dog")[1] == text == outrider("run", "the lazy dog", *how)[1]


@pytest.mark.parametrize(
    ("words", "stdin", "says"),
    [
        (("run", "-"), b"caf\xe9", "byte 3 is 0xe9"),
        (("run", "x", "--temperature", "-1"), b"", "temperature=-1.0 is negative"),
        (("run", "x", "--max-tokens", "0"), b"", "max_tokens=0"),
        (("run", "x", "--rule", "exct"), b"", "Try: 'exact'"),
        (("run", "x", "--drafters", "lokup"), b"", "Try: 'lookup'"),
        (("run", "x", "--target", "/no/such/folder"), b"", "there is no folder /no/such/folder"),
        (("run", "x", "--max-tokns", "3"), b"", "--max-tokens"),
        (("run", "x", "--drafters", "lookup:4"), b"", "Try: --drafters lookup and --depth 4"),
        (("train", "pretrain", "--recipe", "none.toml", "--data", "x"), b"", "there is no file none.toml"),
    ],
)
def test_bad_input_is_exit_code_2_with_a_sentence(outrider, folders, words, stdin, says):
    target = () if "--target" in words or words[0] == "train" else ("--target", folders["target"])
    code, _, err = outrider(*words, *target, stdin=stdin)
    assert code == 2 and says in err and "Traceback" not in err


def test_options_come_from_a_file_and_flags_win(outrider, folders, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(f'target = "{folders["target"]}"\nmax_tokens = 7\ndepth = 2\nstop = ["zzzz"]\n')
    found = json.loads(outrider("run", "the fox", "--config", file, "--json")[1])
    assert len(found["tokens"]) == 7 and max(found["stats"]["per_step_drafted"]) <= 2
    assert len(json.loads(outrider("run", "the fox", "--config", file, "--max-tokens", 3, "--json")[1])["tokens"]) == 3
    file.write_text("max_tokns = 7")
    code, _, err = outrider("run", "the fox", "--config", file)
    assert code == 2 and "Try: 'max_tokens'" in err


def test_ctrl_c_in_a_stream_is_exit_code_130_and_frees_the_row(outrider, folders, monkeypatch):
    runtimes = []
    step = Runtime.stream

    def interrupted(self, *args, **knobs):
        runtimes.append(self)
        for i, chunk in enumerate(step(self, *args, **knobs)):
            if i == 3:
                raise KeyboardInterrupt
            yield chunk

    monkeypatch.setattr(Runtime, "stream", interrupted)
    code, _, err = outrider("run", "the sea", "--target", folders["target"], "--max-tokens", 50)
    assert code == 130 and "interrupted" in err
    assert runtimes[0].engine.batcher.running == [] and runtimes[0].engine.target.rows.active == 0


def test_chat_keeps_the_conversation(outrider, folders, monkeypatch):
    lines = iter(["hello", "and again", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    seen = []
    stream = Runtime.stream
    monkeypatch.setattr(Runtime, "stream", lambda self, m, **k: (seen.append([dict(x) for x in m]), stream(self, m, **k))[1])
    code, *_ = outrider("chat", "--target", folders["target"], "--max-tokens", 5, "--system", "be brief")
    assert code == 0 and seen.pop(0)[-1]["content"] == "?", "it is seen that a chat can be before anybody types"
    assert [m["role"] for m in seen[1]] == ["system", "user", "assistant", "user"]


def test_demo_shows_origins_and_says_whether_the_texts_are_identical(outrider, folders, monkeypatch):
    monkeypatch.setattr(reference, "target", lambda: folders["target"])
    monkeypatch.setattr(reference, "draft", lambda: folders["draft"])
    monkeypatch.setattr(demo, "SCENES", (demo.Scene("story", "a story", "the quick fox", ("lookup", "model")),))
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = outrider("demo", "--max-tokens", 16, "--rounds", 1, "--compile", "off")
    assert code == 0
    assert "tokens by origin" in out and "draft model" in out
    assert next(line for line in out.splitlines() if line.startswith(" story ")).rstrip().endswith("yes")


PROGRAM = Path(__file__).parent / "ir" / "union.mlir"


def test_opt_prints_programs_and_code_and_says_where_one_is_wrong(outrider, tmp_path):
    code, out, err = outrider("opt", PROGRAM, "--passes", "canonicalize,cse", "--print-after-all")
    assert code == 0 and out.startswith("outrider.program @union {") and out.count("propose") == 4
    assert "// after canonicalize" in err and "// after cse" in err
    code, out, _ = outrider("opt", PROGRAM, "--passes", 'specialize{plan="lookup:4"},canonicalize,dce,lower', "--code")
    assert code == 0 and "def step(parts, now):" in out and '"lookup"' in out and '"model"' not in out
    code, out, _ = outrider("opt", "-", "--passes", "all", stdin=PROGRAM.read_bytes())
    assert code == 0 and "beside" in out
    code, out, _ = outrider("opt", PROGRAM, "--passes", 'specialize{plan="lookup:4"},all,lower', "--code")
    assert code == 0 and "def step(parts, now):" in out, "`all` stands wherever passes stand"
    for words, says in (
        (("opt", PROGRAM.with_name("illegal_prune.mlir")), "illegal_prune.mlir:7:3: a sampled token may be a reason to stop"),
        (("opt", PROGRAM, "--passes", "cze"), "unknown pass 'cze'"),
        (("opt", PROGRAM, "--code"), "is still a hole"),
        (("opt", tmp_path / "none.mlir"), "cannot be read"),
    ):
        code, _, err = outrider(*words)
        assert code == 2 and says in err


def test_profile_keeps_costs_and_chances_by_rank(outrider, folders, tmp_path):
    """Of the pair's own prompts, also where they are longer than the model's context."""
    how = ("--target", folders["target"], "--draft", folders["draft"], "--drafters", "lookup", "--compile", "off", "--patience", 1)
    code, out, _ = outrider("profile", *how, "--file", tmp_path / "p.json")
    data = json.loads((tmp_path / "p.json").read_text())["data"]
    assert code == 0 and f"kept in {tmp_path / 'p.json'}" in out and data["costs"]["verify"]
    assert [cell for cell in data["next"] if cell.startswith("model r")] == [f"model r{k}" for k in range(4)]


def test_what_a_profile_could_not_measure_is_said(outrider, folders, tmp_path):
    """A text of so few tokens ends before a draft model is asked."""
    how = ("--target", folders["target"], "--draft", folders["draft"], "--compile", "off", "--patience", 0.1, "--context", 40)
    code, _, err = outrider("profile", *how, "--file", tmp_path / "p.json")
    assert code == 2 and "model could not be measured" in err and "40 tokens" in err and "Traceback" not in err
    assert json.loads((tmp_path / "p.json").read_text())["data"]["costs"]["draft"] == {}


def test_a_profile_that_was_not_written_is_said_and_is_exit_code_2(outrider, folders, tmp_path, monkeypatch):
    """What was measured is shown all the same."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outrider.measure.profile.save", full)
    how = ("--target", folders["target"], "--drafters", "lookup", "--compile", "off", "--patience", 0.1)
    code, out, err = outrider("profile", *how, "--file", tmp_path / "p.json")
    assert code == 2 and "a step that verifies, ms" in out and "kept in" not in out and f"the profile {tmp_path / 'p.json'} was not written" in err


def test_a_profile_that_could_not_be_is_refused_before_anything_is_loaded(outrider, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.load", None)
    for words, says in (
        (("--drafters", "off"), "there is nothing to profile without drafters"),
        (("--drafters", ","), "there is nothing to profile without drafters"),
        (("--file", "off"), "--file off keeps nothing"),
        (("--file", tmp_path), f"{tmp_path} cannot be written. it is a folder"),
    ):
        code, _, err = outrider("profile", *words)
        assert code == 2 and says in err and "Try: " in err


def test_plan_shows_the_program_and_its_code(outrider, folders):
    code, out, _ = outrider("plan", "--target", folders["target"], "--draft", folders["draft"], "--drafters", "lookup", "--code", "--profile", "off")
    assert code == 0 and "outrider.program @default {" in out and "def step(parts, now):" in out
    assert '("lookup", 8, 1), ("model", 8, 1)' in out, "before the first request, of all drafters at depth 8"
    code, out, _ = outrider("plan", "--target", folders["target"], "--code", "--json", "--profile", "off")
    found = json.loads(out.strip().splitlines()[-1])
    assert code == 0 and "def step" in found["code"] and "outrider.program" in found["program"]


MINE = """outrider.program @mine {
  %text = outrider.context
  %near = outrider.propose "lookup" on %text depth 1 width 1 : point
  %scores = outrider.score %near on %text by "target"
  %outcome = outrider.accept %near, %scores by "coupled"
  outrider.commit %outcome
}
"""


def test_a_program_of_ones_own_is_what_runs(outrider, folders, tmp_path, monkeypatch):
    """Its depth stands, whatever the option says, in `run` and its settings file, `plan` and `chat`."""
    (file := tmp_path / "mine.mlir").write_text(MINE)
    how = ("--target", folders["target"], "--drafters", "lookup", "--depth", 4, "--compile", "off")
    words = ("run", "one two three four five one two three four five one two", *how, "--max-tokens", 30, "--json")
    usual, mine = (json.loads(outrider(*words, *more)[1]) for more in ((), ("--program", file)))
    assert mine["tokens"] == usual["tokens"]
    assert max(usual["stats"]["per_step_drafted"]) > 1 == max(mine["stats"]["per_step_drafted"])
    (settings := tmp_path / "mine.toml").write_text(f'program = "{file}"\n')
    assert json.loads(outrider(*words, "--config", settings)[1])["stats"]["per_step_drafted"] == mine["stats"]["per_step_drafted"]
    code, out, _ = outrider("plan", *how, "--code", "--program", file)
    assert code == 0 and "outrider.program @mine" in out and 'usual(parts, now, (("lookup", 1, 1),), "greedy", False, False)' in out
    monkeypatch.setattr("builtins.input", lambda _: "")
    assert outrider("chat", *how, "--program", file)[0] == 0
    file.write_text(MINE.replace('"lookup"', '"model"'))
    for words in (("run", "x"), ("plan",), ("chat",)):
        code, _, err = outrider(*words, *how, "--program", file)
        assert code == 2 and "@mine asks 'model' to draft" in err
    code, _, err = outrider("run", "x", *how, "--program", tmp_path / "none.mlir")
    assert code == 2 and "cannot be read" in err


def test_files_and_folders_that_are_of_no_use_are_named(outrider, folders, tmp_path, monkeypatch):
    """Two is the code, one line the message: no tracebacks, nothing moved."""
    (config := tmp_path / "mine.json").write_text('{"mine": 1}')
    how = ("--target", folders["target"], "--drafters", "lookup", "--compile", "off", "--max-tokens", 3)
    (in_the_way := tmp_path / "file").write_text("")
    for words, says in (
        (("run", "hi", *how, "--profile", config), "mine.json is no profile. it is left as it is"),
        (("replay", tmp_path), "cannot be read"),
        (("run", "hi", *how, "--explain-divergence", "--json"), "is told in words"),
        (("run", "hi", *how, "--explain-divergence", "--temperature", 1), "differ by chance"),
        (("run", "hi", *how, "--explain-divergence", "--temperature", 1, "--seed", 1, "--rule", "exact"), "differ by chance"),
        (("run", "hi", *how, "--logprobs", 2), "without --json"),
        (("run", "hi", "--target", folders["target"], "--drafters", "off", "--draft", folders["draft"]), "one says that nobody drafts"),
        (("plan", *how, "--prompt", "hi", "--trace", tmp_path), "it is a folder"),
        (("plan", *how, "--trace", tmp_path / "t.json"), "nothing is run without --prompt"),
        (("run", "hi", *how[:-2], "--max-tokens", 3, "--threads", 100_000), "threads=100000"),
        (("run", "hi", "--target", folders["target"], "--drafters", "staged:lookup"), "'staged:lookup' has one stage"),
    ):
        code, _, err = outrider(*words)
        assert code == 2 and says in err and err.count("\n") == 1, err
    assert config.read_text() == '{"mine": 1}' and len(list(tmp_path.iterdir())) == 2
    monkeypatch.setenv("OUTRIDER_CACHE", str(in_the_way))
    code, _, err = outrider("run", "hi", *how)
    assert code == 2 and f"the cache folder {in_the_way} is of no use" in err and "OUTRIDER_CACHE=" in err


@pytest.mark.parametrize("bench", ["speed", "strict", "start", "synthetic", "schedule", "guarantee"])
def test_a_folder_that_cannot_hold_results_is_refused_before_anything_is_measured(outrider, tmp_path, monkeypatch, bench):
    """Results of minutes would be lost: no model is loaded, no process begun."""
    monkeypatch.setattr("outrider.load", None)
    monkeypatch.setattr("subprocess.run", None)
    (in_the_way := tmp_path / "file").write_text("")
    code, _, err = outrider("bench", bench, "--out", in_the_way)
    assert code == 2 and f"outrider: {in_the_way}: File exists. Try: a" in err
    monkeypatch.setattr("os.access", lambda path, mode: False)
    code, _, err = outrider("bench", bench, "--out", tmp_path / "new")
    assert code == 2 and "nothing can be written into" in err and "--out" in err


@pytest.mark.parametrize("command", [("bench", "schedule", "--out", "results"), ("plan", "--prompt", "hi")], ids=" ".join)
def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_loaded(outrider, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("outrider.load", None)
    (in_the_way := tmp_path / "file").write_text("kept")
    for trace, says in ((tmp_path, "it is a folder"), (in_the_way / "t.jsonl", f"{in_the_way}: File exists")):
        code, _, err = outrider(*command, "--trace", trace)
        assert code == 2 and says in err and err.count("\n") == 1, err
    for mine, file in ((tmp_path, tmp_path / "t.jsonl"), (in_the_way, in_the_way)):
        monkeypatch.setattr("os.access", lambda path, mode, mine=mine: Path(path) != mine or not mode & os.W_OK)
        code, _, err = outrider(*command, "--trace", file)
        assert code == 2 and f"{file} cannot be written. you may not" in err
    assert in_the_way.read_text() == "kept"


def test_what_was_measured_is_said_before_it_is_written_down(outrider, tmp_path, monkeypatch):
    """And a disk that is full takes nothing of it."""
    monkeypatch.setattr("outrider.bench.verdict.verdicts", lambda *how: {"some": 1})
    monkeypatch.setattr("outrider.bench.verdict.markdown", lambda result: "the table")

    def full(*how):
        raise OSError(28, "No space left on device", "verdict.json")

    monkeypatch.setattr("outrider.bench.verdict.save_as", full)
    code, out, err = outrider("bench", "verdict", "--out", tmp_path)
    assert (code, out) == (2, "the table\n") and "verdict.json: No space left on device" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--name", "sub/speed"), "--name 'sub/speed' is no name of a file"), (("--name", ".."), "is no name of a file"),
        (("--max-tokens", "0"), "--max-tokens"), (("--threads", "0"), "threads=0 is not a whole number from 1"),
    ],
)  # fmt: skip
def test_a_bench_that_cannot_be_is_refused_before_anything_is_loaded(outrider, tmp_path, monkeypatch, words, says):
    monkeypatch.setattr("outrider.models.load.load_model", None)
    code, out, err = outrider("bench", "speed", "--out", tmp_path, *words)
    assert code == 2 and says in err and not out and "Traceback" not in err, err


@pytest.mark.parametrize(
    ("text", "name"), [("", "corpus"), ("[corpus.a]\nweight = 1.0", "target"), ("[corpus.a]\n[target]", "shared"), ("corpus = 1", "corpus")]
)
def test_a_recipe_without_its_tables_is_refused(outrider, tmp_path, text, name):
    (recipe := tmp_path / "r.toml").write_text(text)
    for stage in (("pretrain", "--data", tmp_path), ("collect",)):
        code, _, err = outrider("train", stage[0], "--recipe", recipe, *stage[1:])
        assert code == 2 and f"r.toml has no table [{name}]" in err and "Traceback" not in err, err


def test_contexts_that_are_no_numbers_are_refused(outrider, tmp_path):
    for contexts in ("²", "128,²", "0", "128,", "9" * 5000):
        code, _, err = outrider("bench", "synthetic", "--contexts", contexts, "--out", tmp_path)
        assert code == 2 and "is no list of token counts" in err and "Try: 128,2048" in err


def test_options_of_run_and_chat_arrive(outrider, tmp_path, monkeypatch):
    """Those of loading, and in a chat those of its texts, from flags or from a file."""
    loaded, asked = [], []

    class Talking:
        def stream(self, messages, **knobs):
            asked.append(knobs)
            return (part for part in ())

    monkeypatch.setattr("outrider.load", lambda target, names, **settings: (loaded.append(settings), Talking())[1])
    monkeypatch.setattr("builtins.input", lambda _: "")
    (file := tmp_path / "mine.toml").write_text('top_k = 7\nprofile = "off"\n')
    words = ("--context", 99, "--quantise", "int8", "--top-p", 0.9, "--min-p", 0.1, "--rule", "exact", "--config", file)
    assert outrider("chat", *words)[0] == 0
    assert {"context": 99, "quantise": "int8", "profile": "off"}.items() <= loaded[0].items()
    assert {"top_k": 7, "top_p": 0.9, "min_p": 0.1, "rule": "exact"}.items() <= asked[0].items()
    for command in (("run", "hi"), ("plan",), ("profile",)):
        monkeypatch.setattr("outrider.load", lambda target, names, **settings: (loaded.append(settings), 1 / 0)[1])
        with pytest.raises(ZeroDivisionError):
            outrider(*command, "--quantise", "int8")
        assert loaded[-1]["quantise"] == "int8"


def test_what_looks_like_a_file_and_is_none_is_said(outrider, folders):
    code, _, err = outrider("run", "story.txt", "--target", folders["target"], "--compile", "off", "--profile", "off", "--max-tokens", 3)
    assert code == 0 and "there is no file story.txt: these words are continued themselves" in err
    assert (
        "there is no file"
        not in outrider("run", "a story.txt", "--target", folders["target"], "--compile", "off", "--profile", "off", "--max-tokens", 3)[2]
    )


def test_a_chat_that_cannot_be_is_refused_before_anybody_types(outrider, folders, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asked"))
    code, _, err = outrider("chat", "--target", folders["target"], "--compile", "off", "--max-tokens", -1)
    assert code == 2 and "max_tokens=-1" in err


def test_a_context_that_is_full_is_said(outrider, folders):
    words = ("run", "one two", "--target", folders["target"], "--drafters", "off", "--compile", "off", "--context", 40, "--max-tokens")
    assert "the context of 40 tokens is full" in outrider(*words, 100)[2] and "is full" not in outrider(*words, 5)[2]
