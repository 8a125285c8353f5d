"""What speculation should cost and bring: the closed forms of Leviathan et al. (2211.17192).

alpha: acceptance rate of one token; gamma: drafted tokens a step; c: time of a draft step over a target step.
"""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a step emits, bonus included: (1 - alpha^(gamma+1)) / (1 - alpha)."""
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Wall-clock gain over plain decoding if scoring gamma + 1 tokens costs as much as one (Theorem 3.8)."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations(alpha: float, gamma: int, c_ops: float) -> float:
    """Growth of arithmetic over plain decoding; c_ops: operations of a draft step over a target step (Theorem 3.11)."""
    return (gamma * c_ops + gamma + 1) / expected_tokens(alpha, gamma)


def best_depth(alpha: float, c: float, limit: int = 64) -> int:
    """The gamma <= limit with the largest speed-up; 0 when drafting does not pay."""
    return max(range(limit + 1), key=lambda gamma: speedup(alpha, gamma, c))
