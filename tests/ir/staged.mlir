// Staged drafting: what the lookup guesses, the small model reads at once, and goes on from as much as it agrees with.
// RUN: --passes flatten-relay,specialize{plan="lookup:6 model:3"},lower
outrider.program @staged {
  %text = outrider.context
  %guess = outrider.propose "lookup" on %text depth ? width ? : point
  %draft = outrider.relay "model" over %guess depth ? : point
  %kept = outrider.prune %draft budget ?
  %scores = outrider.score %kept on %text by "target"
  %outcome = outrider.accept %kept, %scores by "coupled"
  outrider.commit %outcome
}
// CHECK:      %guess = outrider.propose "lookup" on %text depth 6 width 1 : point
// CHECK-NEXT: %[[O:.*]] = outrider.propose "model" over %guess : point
// CHECK-NEXT: %[[A:.*]] = outrider.agree %[[O]] by "model"
// CHECK-NEXT: %[[D:.*]] = outrider.propose "model" after %[[A]] depth 3 width 1 : point blind bounded
// CHECK-NEXT: %kept = outrider.prune %[[D]] budget 0
