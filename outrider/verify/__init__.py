"""Acceptance rules. They see Drafts and log-probabilities, never models."""
