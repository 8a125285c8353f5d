"""Things that score: transformers models on our slot cache, and the toy model that tests trust."""
