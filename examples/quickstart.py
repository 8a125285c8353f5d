"""The same text, plain and speculative, and who wrote which token."""

import outrider

rt = outrider.load()  # the embedded reference pair; outrider.load("path-or-hub-id", drafters=["lookup"]) for your own model
ask = [{"role": "user", "content": "Copy the following text word for word:\nA fox found a red boat by the lake. On day 3, Nils described 6 ladders."}]

rt.chat(ask, max_tokens=8)  # what drafting costs here is measured after the first request of a pair, and kept for later starts
fast = rt.chat(ask, max_tokens=60)
plain = rt.chat(ask, max_tokens=60, speculation="off")
print(fast.text)
print("same tokens:", fast.tokens == plain.tokens)
print("tokens per target call:", round(fast.stats["mean_acceptance_length"], 2), "against", plain.stats["mean_acceptance_length"])
print("drafted by:", {name: fast.origins.count(name) for name in dict.fromkeys(fast.origins)})

for chunk in rt.stream("Once upon a time, a fox", max_tokens=40, temperature=0.8, seed=1):  # a seed fixes the text, whoever drafts
    print(chunk.text, end="", flush=True)
print()
