"""How good is the pair? Agreement of the draft with the target by category, and the model card that says so.

*Agreement*: the share of positions of the target's own greedy text where the draft's most likely token, given the
same text before it, is the target's.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from outrider.bench import prompts
from outrider.measure.trace import repetition
from outrider.train.collect import prompts as held_out_prompts
from outrider.train.corpus import Marks, Streams


@torch.inference_mode()
def agreement(target: Path, draft: Path, cases: dict[str, list[list[int]]], device: str, length: int) -> dict[str, dict[str, float]]:
    """Per category: agreement, repetition of the target's text, positions judged. `cases`: category -> prompts' ids, cut to what the
    context holds."""
    import outrider
    from outrider.models.load import load_model

    rt = outrider.load(target, drafters=[], device=device, rows=8)
    room = rt.engine.target.spec.context - length
    module = load_model(draft, device=device, rows=1, context=64, check=False)[0].module
    table = {}
    for category, ids in cases.items():
        seqs = [rt.engine.submit(rt.request(i[:room], max_tokens=length)) for i in ids]
        while any(s.finish_reason is None for s in seqs):
            rt.engine.advance(seqs)
        hits = judged = 0
        for seq in seqs:
            start = len(seq.request.prompt)
            guess = module(input_ids=torch.tensor([seq.tokens], device=device), use_cache=False).logits[0, start - 1 : -1].argmax(-1)
            hits += int((guess.cpu() == torch.tensor(seq.generated)).sum())
            judged += seq.produced
        table[category] = {"agreement": hits / judged, "repetition": repetition([s.generated for s in seqs]), "positions": judged}
    return table


def cases(tokenizer: Any, work: Path, recipe: dict[str, Any], count: int = 12) -> dict[str, list[list[int]]]:
    """Our benchmark prompts by category, and `count` held-out in-domain prompts of every corpus. A tokenizer without chat
    template is not asked what it cannot read."""
    asked = {c: [p for p in prompts.load(c) if tokenizer.chat_template or p.messages is None] for c in prompts.CATEGORIES}
    ours, marks = {c: [p.encode(tokenizer) for p in some] for c, some in asked.items() if some}, Marks.of(work / "corpus")
    for name in (n for n, d in recipe["corpus"].items() if d["weight"] > 0):
        source = held_out_prompts(Streams(work / "corpus", {name: 1.0}, "held", 7), recipe["collect"]["prompt"], marks)
        ours[f"held-out {name}"] = [next(source) for _ in range(count)]
    return ours


def judge(recipe: dict[str, Any], work: Path, device: str, progress: Callable[[str], None]) -> None:
    """Write work/judged.json from work/target and work/draft."""
    from outrider.models.load import load_tokenizer

    tokenizer = load_tokenizer(work / "target")
    table = agreement(work / "target", work / "draft", cases(tokenizer, work, recipe), device, 128)
    ours = [n for n in prompts.CATEGORIES if n in table]
    for names, label in ((ours, f"{len(ours)} categories"), ([n for n in table if n.startswith("held-out")], "held-out in-domain")):
        table[f"mean of {label}"] = {k: _mean(table[n][k] for n in names) for k in ("agreement", "repetition", "positions")}
    (work / "judged.json").write_text(json.dumps(table, indent=1) + "\n")
    for name, row in table.items():
        progress(f"{name:32} agreement {row['agreement']:.3f}  repetition {row['repetition']:.3f}")


def _mean(values: Iterable[float]) -> float:
    kept = list(values)
    return sum(kept) / len(kept)
