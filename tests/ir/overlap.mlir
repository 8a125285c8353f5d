// A drafter with a device of its own goes on while the target verifies, where that is expected to save more than a twentieth of a step:
// 0.9^5 of 0.4 here, of a step of 1.4. Four guesses at 0.5 come true too rarely; who shares its device waits, and so does a tree.
// RUN: --passes specialize{plan="model:4 small:4 twin:4 wide:4x2"},schedule{costs="target:1 model:0.4 small:0.4 twin:0.4 wide:0.4" devices="target:cuda-0 model:cuda-1 small:cuda-2 twin:cuda-0 wide:cuda-3" acceptance="model:0.9 small:0.5 twin:0.9 wide:0.9" sync=0.02}
outrider.program @overlap {
  %text = outrider.context
  %a = outrider.propose "model" on %text depth ? width ? : sampled
  %b = outrider.propose "small" on %text depth ? width ? : sampled
  %c = outrider.propose "twin" on %text depth ? width ? : sampled
  %d = outrider.propose "wide" on %text depth ? width ? : sampled
  %draft = outrider.union %a, %b, %c, %d
  %scores = outrider.score %draft on %text by "target"
  %outcome = outrider.accept %draft, %scores by "exact"
  outrider.commit %outcome
}
// A strict program's drafts are chains, which is what is overlapped.
outrider.program @strict {
  %text = outrider.context
  %draft = outrider.propose "model" on %text depth ? width ? : point
  %kept = outrider.prune %draft budget 4 chain
  %scores = outrider.score %kept on %text by "target"
  %outcome = outrider.accept %kept, %scores by "coupled"
  outrider.commit %outcome
}
// Cut to three nodes, not all four guesses can come true.
outrider.program @cut {
  %text = outrider.context
  %draft = outrider.propose "model" on %text depth ? width ? : point
  %kept = outrider.prune %draft budget 3
  %scores = outrider.score %kept on %text by "target"
  %outcome = outrider.accept %kept, %scores by "coupled"
  outrider.commit %outcome
}
// CHECK:      %a = outrider.propose "model" on %text depth 4 width 1 device "cuda-1" : sampled overlapped
// CHECK-NEXT: %b = outrider.propose "small" on %text depth 4 width 1 device "cuda-2" : sampled{{$}}
// CHECK-NEXT: %c = outrider.propose "twin" on %text depth 4 width 1 device "cuda-0" : sampled{{$}}
// CHECK-NEXT: %d = outrider.propose "wide" on %text depth 4 width 2 device "cuda-3" : sampled{{$}}
// CHECK:      outrider.program @strict {
// CHECK:      {{.*}} = outrider.propose "model" on {{.*}} depth 4 width 1 device "cuda-1" : point overlapped
// CHECK:      outrider.program @cut {
// CHECK:      {{.*}} = outrider.propose "model" on {{.*}} depth 4 width 1 device "cuda-1" : point{{$}}
