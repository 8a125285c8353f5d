"""The language of pipelines, an xDSL dialect: who drafts, what is verified, by which rule.

Values are pure until `commit`. A draft is a set of nodes of the step's forest; its type says how they were proposed: `point`
(chosen), `sampled` (drawn) or `mixed`.
"""

from xdsl.ir import Dialect

from outrider.ir.deciding import AcceptOp, CommitOp, DeferOp, ProgramOp, ScoreOp
from outrider.ir.drafting import AgreeOp, ContextOp, EmptyOp, ProposeOp, PruneOp, RelayOp, UnionOp
from outrider.ir.types import ContextType, DraftType, OutcomeType, ScoresType

Outrider = Dialect(
    "outrider",
    [ContextOp, EmptyOp, ProposeOp, RelayOp, AgreeOp, UnionOp, PruneOp, DeferOp, ScoreOp, AcceptOp, CommitOp, ProgramOp],
    [ContextType, DraftType, ScoresType, OutcomeType],
)
