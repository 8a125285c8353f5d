"""One pass a file. `compiler/pipeline.py` lists them in the order they run."""
