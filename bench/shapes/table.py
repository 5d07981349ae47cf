"""How are the costs of drafters at real size shown?"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

NAMES = {"specblock": "SpecBlock", "eagle3": "EAGLE-3", "dflash": "DFlash, JetSpec"}
"""JetSpec's costs are DFlash's."""


def print_shapes(document: dict[str, Any], console: Console) -> None:
    """One table of counts and one of times a model, then the ratio with its assumptions."""
    options, limit = document["options"], document["limit"]
    plan = options["plan"]
    console.print(
        f"counted: bfloat16, {options['nodes']} nodes verified; SpecBlock and EAGLE-3 draft {plan['depth']} deep (EAGLE-3 continues "
        f"{plan['topk']} nodes a step, SpecBlock's second block {plan['leaves']} leaves), JetSpec and DFlash 15; {plan['accepted']} tokens "
        "were accepted in the round before", soft_wrap=True,
    )  # fmt: skip
    for model, found in document["models"].items():
        console.print(_counts(model, found))
        if "time" in found:
            console.print(_times(model, found["time"]))
        depths = ", ".join(f"{d}: {r['bytes']:.2f}" for d, r in found["specblock_over_eagle3_by_depth"].items())
        console.print(f"{model}, first row: SpecBlock / EAGLE-3 bytes by depth {depths}", soft_wrap=True)
        for batch, context in found["context_at_limit"].items():
            where = "at no context" if context is None else f"up to {context} tokens of context"
            console.print(f"{model}, batch {batch}: SpecBlock drafts within {limit:g} x EAGLE-3's bytes {where}", soft_wrap=True)  # fmt: skip
    if options["json"]:
        console.print(f"JSON: {options['json']}", soft_wrap=True)


def _counts(model: str, found: dict[str, Any]) -> Table:
    table = Table(title=f"{model}: bytes and operations of a round")
    for i, name in enumerate(("batch x context", "plain GB", "verify GB", *(f"{NAMES[n]} GB" for n in NAMES), "SpecBlock / EAGLE-3 GB", "verify GFLOP", *(f"{NAMES[n]} GFLOP" for n in NAMES), "SpecBlock / EAGLE-3 FLOP")):  # fmt: skip
        table.add_column(name, justify="left" if i == 0 else "right")
    for c in found["cells"]:
        ratio, drafters = c["specblock_over_eagle3"], c["drafters"]
        table.add_row(
            f"{c['batch']} x {c['context']}", f"{c['plain']['bytes'] / 1e9:.2f}", f"{c['verify']['bytes'] / 1e9:.2f}",
            *(f"{drafters[n]['draft']['bytes'] / 1e9:.2f}" for n in NAMES), f"{ratio['bytes']:.3f}",
            f"{c['verify']['flops'] / 1e9:.0f}", *(f"{drafters[n]['draft']['flops'] / 1e9:.0f}" for n in NAMES), f"{ratio['flops']:.2f}",
        )  # fmt: skip
    first = found["cells"][0]["drafters"]
    table.caption = ", ".join(f"{NAMES[n]}: {first[n]['num_calls']} call{'s' if first[n]['num_calls'] > 1 else ''} a round, {found['num_params'][n] / 1e6:.0f} M parameters" for n in NAMES)  # fmt: skip
    return table


def _times(model: str, time: dict[str, Any]) -> Table:
    title = f"{model}, batch {time['batch']}, context {time['context']}: ms ({time['kind']})"
    table = Table(title=title, caption=f"SpecBlock / EAGLE-3 drafting time: {time['specblock_over_eagle3']:.3f}")
    for i, name in enumerate(("", "draft", "draft + verify", "drafting share")):
        table.add_column(name, justify="left" if i == 0 else "right")
    table.add_row("plain round", "-", f"{time['plain_ms']:.1f}", "-")
    table.add_row("verify alone", "-", f"{time['verify_ms']:.1f}", "-")
    for n, words in NAMES.items():
        draft, whole = time["draft_ms"][n], time["round_ms"][n]
        table.add_row(words, f"{draft:.1f}", f"{whole:.1f}", f"{draft / whole:.1%}")
    return table
