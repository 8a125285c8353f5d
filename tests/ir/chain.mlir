// One drafter, one chain; the holes are filled by a plan. At temperature 0 what would be drawn is chosen.
// RUN: --passes canonicalize,specialize{plan="model:5"},lower
outrider.program @chain {
  %text = outrider.context
  %draft = outrider.propose "model" on %text depth ? width ? : sampled
  %scores = outrider.score %draft on %text by "target"
  %outcome = outrider.accept %draft, %scores by "exact" at temperature 0
  outrider.commit %outcome
}
// CHECK:      %draft = outrider.propose "model" on %text depth 5 width 1 : point
// CHECK-NEXT: %scores = outrider.score %draft on %text by "target"
// CHECK-NEXT: %outcome = outrider.accept %draft, %scores by "greedy"
