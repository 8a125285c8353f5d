// A fixed tree, Medusa-style: the best seven nodes for how often the first, second and third likeliest child is right.
// RUN: --passes specialize{plan="model:3" budget=7},schedule{trees="model:0.6,0.3,0.1" nodes=7},lower
outrider.program @fixed_tree {
  %text = outrider.context
  %draft = outrider.propose "model" on %text depth ? width ? : point
  %kept = outrider.prune %draft budget ?
  %scores = outrider.score %kept on %text by "target"
  %outcome = outrider.accept %kept, %scores by "coupled"
  outrider.commit %outcome
}
// CHECK: %draft = outrider.propose "model" on %text depth 3 width 2 shape "-1 0 -1 1 0 2 1" : point bounded
