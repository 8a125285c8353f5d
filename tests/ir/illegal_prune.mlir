// Drawn nodes may not be forgotten.
// RUN: --passes canonicalize
// ERROR: illegal_prune.mlir:7:3: a sampled token may be a reason to stop, never a reason to forget
outrider.program @illegal {
  %text = outrider.context
  %draft = outrider.propose "model" on %text depth 4 width 2 : sampled
  %kept = outrider.prune %draft budget 2
  %scores = outrider.score %kept on %text by "target"
  %outcome = outrider.accept %kept, %scores by "exact"
  outrider.commit %outcome
}
