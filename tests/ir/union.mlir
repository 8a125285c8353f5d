// Three drafters: those that choose grow one trie, in the order of their costs; one asked twice for the same is asked once; one that is
// not in the plan is gone.
// RUN: --passes canonicalize,cse,merge-tries,dce,specialize{plan="suffix:8 lookup:8 model:4"},canonicalize,dce,schedule{costs="lookup:0.01 suffix:0.02 model:0.3"},lower
outrider.program @union {
  %text = outrider.context
  %a = outrider.propose "model" on %text depth ? width ? : sampled
  %b = outrider.propose "suffix" on %text depth ? width ? : point
  %c = outrider.propose "lookup" on %text depth ? width ? : point
  %again = outrider.propose "suffix" on %text depth ? width ? : point
  %never = outrider.propose "store" on %text depth ? width ? : point
  %draft = outrider.union %a, %b, %c, %again, %never
  %kept = outrider.prune %draft budget ? unless sampled
  %scores = outrider.score %kept on %text by "target"
  %outcome = outrider.accept %kept, %scores by "exact"
  outrider.commit %outcome
}
// CHECK-NOT:  "store"
// CHECK:      %[[L:.*]] = outrider.propose "lookup" on %text depth 8 width 1 : point
// CHECK-NEXT: %[[S:.*]] = outrider.propose "suffix" on %text beside %[[L]] depth 8 width 1 : point
// CHECK-NEXT: %[[M:.*]] = outrider.propose "model" on %text depth 4 width 1 : sampled
// CHECK-NEXT: %[[U:.*]] = outrider.union %[[S]], %[[M]]
// CHECK-NEXT: %kept = outrider.prune %[[U]] budget 0 unless sampled
