// The small model answers by itself where it is sure. That is approximate, and says so.
// RUN: --passes canonicalize,cse,dce
outrider.program @deferral approximate {
  %text = outrider.context
  %draft = outrider.propose "model" on %text depth 8 width 1 : point
  %rest = outrider.defer %draft unless sure 0.9
  %scores = outrider.score %rest on %text by "target"
  %outcome = outrider.accept %rest, %scores by "typical"
  outrider.commit %outcome
}
// CHECK:      outrider.program @deferral approximate {
// CHECK:      %rest = outrider.defer %draft unless sure 0.9
// CHECK-NEXT: %scores = outrider.score %rest on %text by "target"
