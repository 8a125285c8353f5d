// A strict program verifies one path a row, and every step of it has one shape: nothing is inlined.
// RUN: --passes inline-early-exit
outrider.program @strict {
  %text = outrider.context
  %draft = outrider.propose "early-exit:2" on %text depth 4 width 1 : point
  %kept = outrider.prune %draft budget 0 chain
  %scores = outrider.score %kept on %text by "target"
  %outcome = outrider.accept %kept, %scores by "coupled"
  outrider.commit %outcome
}
// CHECK:     outrider.prune %draft budget 0 chain
// CHECK-NOT: reusing
