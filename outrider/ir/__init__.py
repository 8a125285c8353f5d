"""The language that pipelines are written in: an xDSL dialect, its text, and programs from settings."""
