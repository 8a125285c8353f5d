"""What `bench speed` prints: two tables of ratios, one of what explains them, and what they are to be read with."""

from typing import Any

Table = dict[tuple[str, str], dict[str, Any]]
GPU_ONLY = ("J/token", "host waits/step")


def markdown(result: dict[str, Any]) -> str:
    """The result of `run.speed` in words: by category, contender; then the noise, and the memory's speed."""
    table = {(r["category"], r["contender"]): r for r in result["summary"]}
    names = list(dict.fromkeys(r["contender"] for r in result["summary"]))
    parts = [_ratios(table, names, "stock_plain"), _ratios(table, names, "ours_plain"), _explained([table["all", name] for name in names])]
    if found := table.get(("all", "ours plain again"), {}).get("against_ours_plain"):
        parts.append(
            f"Noise: ours plain against itself {found['ratio']:.3f}x, {found['worst']:.2f}..{found['best']:.2f} over {found['pairs']} prompts."
        )
    if roof := result.get("roofline"):
        parts.append(
            f"A step of ours plain takes {roof['plain_step_ms']:.2f} ms and reads {roof['weight_bytes'] / 1e6:.0f} MB of weights: "
            f"{roof['weights_gb_s']:.1f} GB/s; a sum over memory reads {roof['memory_gb_s']:.1f} GB/s here: {roof['weights_gb_s'] / roof['memory_gb_s']:.0%} of it."
        )
    return "\n\n".join(parts)


def _ratios(table: Table, names: list[str], label: str) -> str:
    columns = list(dict.fromkeys(category for category, _ in table))
    lines = [f"Decoding, times as fast as {label.replace('_', ' ')} (geometric mean over prompts)", ""]
    lines += [f"| contender | {' | '.join(columns)} | worst..best prompt |", "|---" * (len(columns) + 2) + "|"]
    for name in names:
        cells = [table.get((category, name), {}).get(f"against_{label}") for category in columns]
        spread = f"{cells[-1]['worst']:.2f}..{cells[-1]['best']:.2f}" if cells[-1] else "-"
        ratios = [f"{cell['ratio']:.2f}x" if cell else "-" for cell in cells]
        lines.append(f"| {' | '.join([name, *ratios, spread])} |")
    return "\n".join(lines)


def _explained(table: list[dict[str, Any]]) -> str:
    told = [_line(r) for r in table]
    columns = [
        name for name in dict.fromkeys(name for line in told for name in line) if name not in GPU_ONLY or any(line[name] != "-" for line in told)
    ]
    lines = [f"| {' | '.join(['over all prompts', *columns])} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {' | '.join([r['contender'], *[line[name] for name in columns]])} |" for r, line in zip(table, told, strict=True)]
    return "\n".join(lines)


def _line(r: dict[str, Any]) -> dict[str, str]:
    """The figures of a contender, by column."""

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    step = r["ms_per_step"]
    return {
        "tokens/s": shown(r["tokens_per_second"], ".0f"),
        "ms a step": shown(step.get("step"), ".2f"), "draft forwards": shown(step.get("draft"), ".2f"),
        "verify forward": shown(step.get("verify"), ".2f"), "host": shown(step.get("host"), ".2f"),
        "first token ms": shown(r["first_token_ms"], ".1f"), "tokens/call": shown(r["tokens_per_call"], ".2f"),
        "accepted": shown(r["acceptance_rate"], ".0%"), "repeated": shown(r["repetition"], ".0%"),
        "J/token": shown(r.get("joules_per_token"), ".3f"), "host waits/step": shown(r.get("waits_per_step"), ".2f"),
        "= ours plain": _of(r["identical_to_ours_plain"], r), "= stock plain": _of(r["identical_to_stock_plain"], r),
    }  # fmt: skip


def _of(same: int | None, r: dict[str, Any]) -> str:
    return "-" if same is None else f"{same} of {r['prompts']}"
