// The target drafts for itself with cheaper weights, and never pays: profile-guided dead code elimination leaves plain decoding.
// RUN: --passes specialize{plan="quantised:0"},canonicalize,dce
outrider.program @self_draft {
  %text = outrider.context
  %draft = outrider.propose "quantised" on %text depth ? width ? : sampled
  %scores = outrider.score %draft on %text by "target"
  %outcome = outrider.accept %draft, %scores by "exact"
  outrider.commit %outcome
}
// CHECK:      %[[E:.*]] = outrider.empty
// CHECK-NEXT: %scores = outrider.score %[[E]] on %text by "target"
// CHECK-NOT:  propose
