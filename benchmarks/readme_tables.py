"""Write the tables of README.md and of the documentation from result files: `python benchmarks/readme_tables.py`.

A table stands between `<!-- results: FILE -->` and `<!-- end -->`, where FILE lies in benchmarks/results; `FILE 4096` takes
only the rows whose case holds that word. Of a file of `bench_dynamic.py` or `bench_intervals.py`, `FILE PART` shows one part,
and `FILE targets` what was required and aimed at; `FILE PART whole` of `bench_dynamic.py` shows only the whole time.
Of a file of `bench_ampere.py`, `FILE 8.9` shows one architecture; of one of `bench_generation.py`, `FILE step` and `FILE full` show
decoding.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plot import total_ms

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
MARKED = re.compile(r"(<!-- results: (\S+)((?: \S+)*) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NAMES = {
    "dmattn": "dmattn_ops",
    "dmattn-unmasked": "without the mask",
    "dmattn-sm80": "portable kernels",
    "fa4": "FA4",
    "cudnn": "cuDNN",
    "flex": "flex_attention",
    "fa2": "FlashAttention-2",
    "sdpa": "SDPA",
    "sdpa-efficient": "SDPA, memory-efficient",
}
DYNAMIC_NAMES = {
    "dmattn-dense": "our dense causal",
    "fa4-dense": "FA4, dense causal",
    "flex": "flex_attention",
    "fa4": "FA4 with block lists",
}


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def _table(heads: list[str], lines: Iterable[list[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _by_case(rows: list[Row]) -> dict[str, dict[str, Row]]:
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["implementation"]] = row
    return cases


def _shown(cases: dict[str, dict[str, Row]]) -> list[str]:
    return [name for name in NAMES if any(name in case for case in cases.values())]


def dense_table(rows: list[Row]) -> str:
    """Forward and backward rates, and the geometric means of our rates over each peer's."""
    cases = _by_case(rows)
    names = _shown(cases)
    fast = max(row["forward_tflops"] for row in rows) > 1
    unit, factor = ("TFLOP/s", 1) if fast else ("GFLOP/s", 1000)

    def cell(row: Row | None) -> str:
        if row is None:
            return ""
        return " / ".join(f"{row[part] * factor:.0f}" for part in ("forward_tflops", "backward_tflops"))

    lines = [[case, *(cell(found.get(name)) for name in names)] for case, found in cases.items()]
    means = []
    for name in names[1:]:
        both = [(found["dmattn"], found[name]) for found in cases.values() if name in found]
        ratios = (
            geometric_mean(ours[part] / theirs[part] for ours, theirs in both)
            for part in ("forward_tflops", "backward_tflops")
        )
        means.append(" / ".join(f"{ratio:.2f}" for ratio in ratios))
    lines.append(["dmattn_ops / this column (geometric mean)", "", *means])
    return _table([f"{unit} forward / backward", *(NAMES[name] for name in names)], lines)


def masks_table(rows: list[Row]) -> str:
    """The whole time of a call, mask work included, and how many times each peer takes."""
    cases = _by_case(rows)
    names = _shown(cases)

    def cell(found: dict[str, Row], name: str) -> str:
        if name not in found:
            return ""
        ours, total = total_ms(found["dmattn"]), total_ms(found[name])
        if total is None or ours is None:
            return ""
        return f"{total:.2f}" if name == "dmattn" else f"{total:.2f} ({total / ours:.1f}x)"

    lines = [[case, *(cell(found, name) for name in names)] for case, found in cases.items()]
    return _table(["ms, mask work + forward + backward", *(NAMES[name] for name in names)], lines)


def steps_table(rows: list[Row]) -> str:
    """The time of a training step with each implementation, over ours, and how many graphs a forward is."""
    lines = [
        [
            f"{row['part']}, {row['case']}",
            NAMES[row["implementation"]],
            f"{row['step_ms']:.1f}",
            f"{row['times_dmattn']:.2f}x",
            str(row["graphs"]),
        ]
        for row in rows
        if "step_ms" in row
    ]
    return _table(["a training step", "attention", "ms", "time / ours", "graphs"], lines)


def summary_table(summary: list[Row]) -> str:
    """What each mask saves of the dense time, and the peers' times over ours."""

    def times(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}x"

    lines = [
        [
            line["case"],
            f"{line['density']:.2f}",
            f"{line['tile_density']:.2f}",
            f"{1 / (1 - line['saved']):.2f}x",
            times(line.get("sdpa_over_ours")),
            times(line.get("flex_over_ours")),
        ]
        for line in summary
    ]
    heads = [
        "mask, sparsity",
        "elements kept",
        "tiles visited",
        "our dense kernels / ours",
        "SDPA / ours",
        "flex / ours",
    ]
    return _table(heads, lines)


def features_table(rows: list[Row]) -> str:
    """Milliseconds of calls that differ in one feature, and in brackets how many times the first of them."""
    lines = [
        [row["case"], *(f"{row[f'{part}_ms']:.2f} ({row[f'{part}_ratio']:.2f}x)" for part in ("forward", "backward"))]
        for row in rows
    ]
    return _table(["ms", "forward", "backward"], lines)


def rows_table(rows: list[Row]) -> str:
    """Milliseconds of calls on which a peer was once ahead, those of the fastest peer, and its time over ours."""

    def cell(row: Row, part: str) -> str:
        peer = row[f"{part}_best_peer"]
        if peer is None:
            return f"{row[f'{part}_ms']:.3f}, no peer runs it"
        theirs = f"{NAMES.get(peer, peer)} {row[f'{part}_peers_ms'][peer]:.3f}"
        return f"{row[f'{part}_ms']:.3f}, {theirs} ({row[f'{part}_ratio']:.2f}x)"

    lines = [[row["case"], *(cell(row, part) for part in ("forward", "backward"))] for row in rows]
    return _table(["our ms, those of the fastest other, and its time / ours", "forward", "backward"], lines)


def host_table(rows: list[Row]) -> str:
    """Microseconds that the host takes for forward and backward of a call so small that the GPU takes none."""
    cases = _by_case([row for row in rows if "call_us" in row])
    columns = {"dmattn": NAMES["dmattn"], "dmattn, a tensor": "the same, given the tensor", "sdpa": NAMES["sdpa"]}
    lines = [
        [case, *(f"{found[name]['call_us']:.0f}" if name in found else "" for name in columns)]
        for case, found in cases.items()
    ]
    return _table(["us on the host", *columns.values()], lines)


def architecture_table(rows: list[Row]) -> str:
    """Milliseconds of forward and backward, those of a forward with its mask work, and how many times as long each peer takes."""
    cases = _by_case([row for row in rows if "missing" not in row])
    peers = [name for name in ("fa2", "flex") if any(name in case for case in cases.values())]

    def times(row: Row) -> tuple[float, float]:
        return row["forward_ms"] + row.get("prepare_ms", 0.0), row["backward_ms"]

    def cell(own: Row, other: Row | None) -> str:
        if other is None:
            return ""
        ratios = (theirs / ours for ours, theirs in zip(times(own), times(other), strict=True))
        return " / ".join(f"{ratio:.2f}x" for ratio in ratios)

    lines = [
        [
            case,
            " / ".join(map(_ms, times(found["dmattn"]))),
            *(cell(found["dmattn"], found.get(name)) for name in peers),
        ]
        for case, found in cases.items()
    ]
    return _table(["ms forward / backward", NAMES["dmattn"], *(f"{NAMES[name]} / ours" for name in peers)], lines)


def _ms(time: float) -> str:
    return f"{time:.3g}" if time < 1000 else f"{time:.0f}"


def dynamic_table(rows: list[Row], only_whole: bool = False) -> str:
    """Milliseconds of the parts of a call with a dynamic mask, and how many times as long each other way takes."""
    parts = {"select": "selection", "forward": "forward", "backward": "backward", "whole": "all of it"}
    parts = {"whole": NAMES["dmattn"]} if only_whole else parts
    cases = _by_case([row for row in rows if "missing" not in row])
    shown = [name for name in DYNAMIC_NAMES if any(name in case for case in cases.values())]
    has_share = not only_whole and any("share" in case["dmattn"] for case in cases.values() if "dmattn" in case)
    has_ideal = all("ideal" in case["dmattn"] for case in cases.values() if "dmattn" in case)

    def line(case: str, found: dict[str, Row]) -> list[str]:
        own = found["dmattn"]
        cells = [case, *(f"{own[f'{part}_ms']:.3g}" for part in parts)]
        if has_share:
            cells.append(f"{own['share']:.0%}" if "share" in own else "")
        others = (found.get(name) for name in shown)
        ratios = (
            "" if row is None else f"{_ms(row['whole_ms'])} ({row['whole_ms'] / own['whole_ms']:.1f}x)"
            for row in others
        )
        return [*cells, *ratios, *([f"{own['ideal']:.1f}x"] if has_ideal else [])]

    heads = ["ms", *parts.values(), *["not attention"] * has_share]
    lines = [line(case, found) for case, found in cases.items() if "dmattn" in found]
    return _table([*heads, *(DYNAMIC_NAMES[name] for name in shown), *["ideal"] * has_ideal], lines)


def training_table(rows: list[Row]) -> str:
    """Milliseconds of whole steps of `bench_training.py`, how many times as fast as dense attention they are, and the ideal."""
    ways = {"dmattn": NAMES["dmattn"], "dmattn packed": "keys packed", "dmattn not packed": "keys not packed"}
    cases = _by_case([row for row in rows if "missing" not in row])
    shown = {way: name for way, name in ways.items() if any(way in found for found in cases.values())}
    lines = []
    for case, found in cases.items():
        own = (found[way] for way in shown)
        times = (f"{_ms(row['whole_ms'])} ({row['speed_up']:.2f}x)" for row in own)
        ideal = [f"{found['dmattn']['ideal']:.2f}x"] if "dmattn" in shown else []
        lines.append([case, _ms(found["dmattn-dense"]["whole_ms"]), *times, *ideal])
    return _table(["ms", DYNAMIC_NAMES["dmattn-dense"], *shown.values(), *["ideal"] * ("dmattn" in shown)], lines)


def intervals_table(rows: list[Row], published: dict[str, list[float]]) -> str:
    """TFLOP/s over non-empty tiles, the whole time, and how many times as long each peer takes."""
    cases = _by_case([row for row in rows if "missing" not in row])
    peers = [name for name in ("flex", "fa4") if any(name in case for case in cases.values())]
    lines = []
    for case, found in cases.items():
        own = found["dmattn"]
        rates = " / ".join(f"{own[part]:.0f}" for part in ("forward_tflops", "backward_tflops"))
        known = published.get(own["mask"], []) if "S32768" in case.split() else []
        theirs = " / ".join(f"{rate:.0f}" for rate in known)
        others = (found.get(name) for name in peers)
        ratios = (
            "" if row is None else f"{_ms(row['whole_ms'])} ({row['whole_ms'] / own['whole_ms']:.1f}x)"
            for row in others
        )
        lines.append([case, rates, theirs, f"{own['whole_ms']:.3g}", *ratios])
    heads = ["mask", "TFLOP/s forward / backward", "FlashMask's own figures", "ms, mask work included"]
    return _table([*heads, *(DYNAMIC_NAMES[name] for name in peers)], lines)


def targets_table(targets: list[Row]) -> str:
    """What was required and aimed at, and what was measured."""
    lines = [
        [row["target"], *(f"{row[name]:.3g}" if name in row else "" for name in ("must", "aim", "measured"))]
        for row in targets
    ]
    return _table(["", "required", "aimed at", "measured"], lines)


GENERATION_NAMES = {
    "dmattn": "dmattn_ops",
    "dmattn-full": "dmattn_ops, all keys",
    "dmattn-invariant": "dmattn_ops, batch-invariant",
    "sdpa-fa2": "SDPA, FlashAttention-2",
    "sdpa-cudnn": "SDPA, cuDNN",
}


def generation_table(rows: list[Row]) -> str:
    """Microseconds of decoding a position of one layer in a CUDA graph, and in eager mode; and the share of copy speed."""

    def cell(row: Row, field: str, factor: float, form: str) -> str:
        return format(row[field] * factor, form) if field in row else ""

    lines = []
    for row in rows:
        if row["implementation"] in GENERATION_NAMES and "missing" not in row:
            numbers = (("graph_ms", 1e3, ".4g"), ("eager_ms", 1e3, ".4g"), ("share_of_copy", 1, ".2f"))
            name = GENERATION_NAMES[row["implementation"]]
            kept = f", keep {row['keep']}" if row["part"] == "step" and row["implementation"] == "dmattn" else ""
            lines.append([row["case"], name + kept, *(cell(row, *number) for number in numbers)])
    return _table(["", "", "graph, us", "eager, us", "share of copy speed"], lines)


def pair_bias_table(rows: list[Row]) -> str:
    """Milliseconds of forward and backward, and the MiB that both take beyond the inputs."""
    cases = _by_case([row for row in rows if "missing" not in row])
    names = _shown(cases)
    numbers = [
        (name, field, form) for field, form in (("whole_ms", _ms), ("peak_mib", "{:.0f}".format)) for name in names
    ]
    lines = [[case, *(form(found[name][field]) for name, field, form in numbers)] for case, found in cases.items()]
    return _table(["", *(f"{NAMES[name]}, {unit}" for unit in ("ms", "MiB") for name in names)], lines)


def trees_table(rows: list[Row]) -> str:
    """Milliseconds of separate sequences and of the tree, how many times as fast that is, and how many times fewer pairs it has."""

    def fewer_pairs(answers: int, length: int, prompt: int) -> float:
        return answers * (prompt + length) ** 2 / (prompt**2 + answers * length * (2 * prompt + length))

    lines = []
    for case, found in _by_case(rows).items():
        answers, length, prompt = (int(word) for word in case.split() if word.isdigit())
        tree, sequences = (found[name]["whole_ms"] for name in ("dmattn", "dmattn-sequences"))
        times = (f"{ratio:.3g}" for ratio in (sequences / tree, fewer_pairs(answers, length, prompt)))
        lines.append([f"{answers} answers of {length} to a prompt of {prompt}", _ms(sequences), _ms(tree), *times])
    return _table(["", "sequences, ms", "tree, ms", "times as fast", "times fewer pairs"], lines)


def table(name: str, words: list[str]) -> str:
    """Return the table of one result file."""
    results = json.loads((RESULTS / name).read_text())
    if "summary" in results:
        return summary_table(results["summary"])
    if "targets" in results:
        if words == ["targets"]:
            return targets_table(results["targets"])
        rows = [row for row in results["rows"] if {row["part"], *row["case"].split(), "whole"} >= set(words)]
        if any(part.endswith("graph_ms") for row in rows for part in row):
            return generation_table(rows)
        if "published_tflops" in results:
            return intervals_table(rows, results["published_tflops"])
        return dynamic_table(rows, only_whole="whole" in words)
    if any("peak_mib" in row for row in results["rows"]):
        return pair_bias_table(results["rows"])
    if any("tokens_of_tree" in row for row in results["rows"]):
        return trees_table(results["rows"])
    if any("ideal" in row for row in results["rows"]):
        return training_table([row for row in results["rows"] if row["part"] in words])
    if "arch" in results["rows"][0]:
        return architecture_table([row for row in results["rows"] if not words or row["arch"] in words])
    if "forward_must" in results["rows"][0]:
        return rows_table([row for row in results["rows"] if all(word in row["case"] for word in words)])
    if "forward_ratio" in results["rows"][0]:
        return features_table([row for row in results["rows"] if set(words) <= set(row["case"].split())])
    if any("graphs" in row for row in results["rows"]):
        return steps_table(results["rows"])
    if "call_us" in results["rows"][0]:
        return host_table(results["rows"])
    rows = [row for row in results["rows"] if all(word in row["case"].split() for word in words)]
    return (masks_table if any(row["prepare_ms"] for row in rows) else dense_table)(rows)


def filled(text: str) -> str:
    """Return README's text with every table made anew."""
    return MARKED.sub(lambda found: found[1] + table(found[2], found[3].split()) + found[5], text)


def main() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
