"""Plain data and pure functions. Imports torch and numpy, and nothing of ours from outside this folder."""
