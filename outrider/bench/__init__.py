"""Benchmarks: real prompts, paired runs, plain decoding without a drafter as the baseline."""
