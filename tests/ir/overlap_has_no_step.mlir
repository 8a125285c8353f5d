// The choice can be made and read, and not run: no step uses a second device yet.
// RUN: --passes schedule{costs="target:1 model:0.4" devices="model:cuda-1" acceptance="model:0.9" sync=0},lower
// ERROR: 'model' is to draft while the target verifies
outrider.program @overlap {
  %text = outrider.context
  %draft = outrider.propose "model" on %text depth 4 width 1 : point
  %scores = outrider.score %draft on %text by "target"
  %outcome = outrider.accept %draft, %scores by "coupled"
  outrider.commit %outcome
}
