// A tree, grown out of order: the likeliest path first, whatever its level.
// RUN: --passes specialize{plan="model:6x3" budget=12},schedule{order="best-first"},lower
outrider.program @tree {
  %text = outrider.context
  %draft = outrider.propose "model" on %text depth ? width ? : point
  %kept = outrider.prune %draft budget ?
  %scores = outrider.score %kept on %text by "target"
  %outcome = outrider.accept %kept, %scores by "coupled"
  outrider.commit %outcome
}
// CHECK:      %draft = outrider.propose "model" on %text depth 6 width 3 order "best-first" : point bounded
// CHECK-NEXT: %kept = outrider.prune %draft budget 12
