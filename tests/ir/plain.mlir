// An empty draft is a draft: plain decoding.
// RUN: --passes canonicalize,lower
outrider.program @plain {
  %text = outrider.context
  %none = outrider.empty
  %kept = outrider.prune %none budget 0
  %scores = outrider.score %kept on %text by "target"
  %outcome = outrider.accept %kept, %scores by "exact"
  outrider.commit %outcome
}
// CHECK:      outrider.program @plain {
// CHECK-NEXT:   %text = outrider.context
// CHECK-NEXT:   %none = outrider.empty
// CHECK-NEXT:   %scores = outrider.score %none on %text by "target"
// CHECK-NEXT:   %outcome = outrider.accept %none, %scores by "exact"
// CHECK-NEXT:   outrider.commit %outcome
// CHECK-NEXT: }
