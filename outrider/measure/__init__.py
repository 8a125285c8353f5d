"""What was measured and what follows from it: records, costs, meters."""
