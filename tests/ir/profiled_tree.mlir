// Trees from a profile: the second likeliest guess is worth its node; a chain where one path is verified, or where nothing was counted.
// RUN: --passes specialize{profile="%S/profile.json" trees=true},canonicalize,dce,schedule{order="best-first"},lower
outrider.program @profiled_tree {
  %text = outrider.context
  %near = outrider.propose "lookup" on %text depth ? width ? : point
  %far = outrider.propose "model" on %text depth ? width ? : point
  %draft = outrider.union %near, %far
  %kept = outrider.prune %draft budget ?
  %scores = outrider.score %kept on %text by "target"
  %outcome = outrider.accept %kept, %scores by "coupled"
  outrider.commit %outcome
}
outrider.program @one_path {
  %text = outrider.context
  %draft = outrider.propose "model" on %text depth ? width ? : point
  %kept = outrider.prune %draft budget ? chain
  %scores = outrider.score %kept on %text by "target"
  %outcome = outrider.accept %kept, %scores by "coupled"
  outrider.commit %outcome
}
// CHECK:      %near = outrider.propose "lookup" on %text depth 5 width 1 : point
// CHECK-NEXT: %far = outrider.propose "model" on %text depth 2 width 3 shape "-1 -1 0 -1" : point blind bounded
// CHECK:      outrider.program @one_path
// CHECK:      %draft_1 = outrider.propose "model" on %text_1 depth 2 width 1 : point
