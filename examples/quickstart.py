"""The same text, plain and speculative, and who wrote which token."""

import outrider

rt = outrider.load()  # the embedded reference pair; outrider.load("path-or-hub-id", drafters=["lookup"]) for your own model
prompt = "Once upon a time, a fox found a red boat"

fast = rt.generate(prompt, max_tokens=60)
plain = rt.generate(prompt, max_tokens=60, speculation="off")
print(fast.text)
print("same tokens:", fast.tokens == plain.tokens)
print("tokens per target call:", round(fast.stats["mean_acceptance_length"], 2), "against", plain.stats["mean_acceptance_length"])
print("drafted by:", {name: fast.origins.count(name) for name in dict.fromkeys(fast.origins)})

for chunk in rt.stream(prompt, max_tokens=40, temperature=0.8, seed=1):  # a seed fixes the text, whoever drafts
    print(chunk.text, end="", flush=True)
print()
