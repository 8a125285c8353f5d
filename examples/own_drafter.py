"""A drafter of your own: it always guesses that the last token comes again. Four verbs, no base class."""

import numpy as np

import outrider
from outrider.core import tree


class Echo:
    name, needs = "echo", ("tokens",)

    def begin(self, seq): ...

    def end(self, seq): ...

    def observe(self, seqs, draft, outcome): ...

    def extend(self, seqs, draft, frontier, width, source, settings, noise):
        last = [draft.token[p] if p >= 0 else seqs[~p].tokens[-1] for p in frontier]
        return tree.grow(draft, frontier, np.array(last), source, score=0.1)


rt = outrider.load(outrider.reference.target(), drafters=[Echo()], depth=2)
out = rt.generate("ha ha ha ha", max_tokens=40)
print(out.text)
print("echoes accepted:", out.origins.count("echo"), "of", out.stats["drafted"], "and the text is the target's own all the same")
