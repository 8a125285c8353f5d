"""Whether, by whom and how far to speculate. Reads records and drafts, never logits; returns nothing that changes a text."""
