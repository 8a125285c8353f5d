// The target's own first two layers draft: scoring goes on from the third.
// RUN: --passes specialize{plan="early-exit:2:4"},inline-early-exit,lower
outrider.program @early_exit {
  %text = outrider.context
  %draft = outrider.propose "early-exit:2" on %text depth ? width ? : point
  %scores = outrider.score %draft on %text by "target"
  %outcome = outrider.accept %draft, %scores by "coupled"
  outrider.commit %outcome
}
// CHECK:      %draft = outrider.propose "early-exit:2" on %text depth 4 width 1 : point
// CHECK-NEXT: %scores = outrider.score %draft on %text by "target" reusing 2 layers
