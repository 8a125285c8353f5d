// Two independent draws carry different noise: they are never one, and k_seq owes each a verdict (SpecTr, 2310.15141).
// RUN: --passes canonicalize,cse,merge-tries,dce
outrider.program @spectr {
  %text = outrider.context
  %a = outrider.propose "model" on %text depth 4 width 1 sample 0 : sampled
  %b = outrider.propose "model" on %text depth 4 width 1 sample 1 : sampled
  %draft = outrider.union %a, %b
  %scores = outrider.score %draft on %text by "target"
  %outcome = outrider.accept %draft, %scores by "k_seq"
  outrider.commit %outcome
}
// CHECK:      %a = outrider.propose "model" on %text depth 4 width 1 sample 0 : sampled
// CHECK-NEXT: %b = outrider.propose "model" on %text depth 4 width 1 sample 1 : sampled
// CHECK-NEXT: %draft = outrider.union %a, %b
