"""A drafter of your own: after a word of the prompt it guesses the word that followed it there. Four verbs, no base class."""

import outrider
from outrider.core import tree


class Parrot:
    name, draws = "parrot", False  # it never samples: its guesses may be pruned and merged

    def begin(self, seq): ...

    def end(self, seq): ...

    def observe(self, seqs, draft, outcome): ...

    def extend(self, seqs, draft, frontier, width, source, settings, noise, levels=1, on=None):
        parents, tokens = [], []
        for place in frontier:
            seq = seqs[~place if place < 0 else draft.row[place]]
            last = seq.tokens[-1] if place < 0 else draft.token[place]
            prompt = seq.request.prompt
            if last in prompt[:-1]:
                parents.append(place)
                tokens.append(prompt[prompt.index(last) + 1])
        return tree.grow(draft, parents, tokens, source, score=0.5)


rt = outrider.load(outrider.reference.target(), drafters=[Parrot()], depth=2)
ask = "Copy the following text word for word:\nOlga measured the brown bridge in Oslo. On day 34, Nils described 6 ladders."
out = rt.chat([{"role": "user", "content": ask}], max_tokens=60)
print(out.text)
print("the parrot wrote", out.origins.count("parrot"), "of", len(out.tokens), "tokens, and the text is the target's own all the same")
