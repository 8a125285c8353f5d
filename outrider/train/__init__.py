"""Training of small models and drafters. The runtime never imports this folder."""
