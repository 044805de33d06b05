"""Write what the pages show of the library itself: `python docs/generate.py`.

- `pictures/*.svg`: masks as `masks.md` explains them, drawn from what `prepare_mask` and `dynamic_mask` return.
- What stands between `<!-- generated: NAME -->` and `<!-- end -->`, such as the schemas of the operators.
- The tables of result files (`benchmarks/readme_tables.py`).
- `csrc/cpu/schemas.h`, the schemas of the operators as the C++ library defines them.

tests/project/test_docs.py fails where something is not as it would be written.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path

import torch
from torch import Tensor

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS.parent / "benchmarks")]

import readme_tables  # noqa: E402
from dmattn_ops import TileMask, dynamic_mask, flex, prepare_mask, selection_mask  # noqa: E402
from dmattn_ops.choice.resources import SOURCE, TABLES  # noqa: E402
from dmattn_ops.masks.layout import FULL, PARTIAL  # noqa: E402
from dmattn_ops.ops import schemas as ops  # noqa: E402
from dmattn_ops.testing.oracle import EPS  # noqa: E402

OPERATORS_HEADER = DOCS.parent / "csrc" / "cpu" / "schemas.h"
GENERATED = re.compile(r"(<!-- generated: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
SIZE = 24  # queries and keys of a picture
CELL = 8  # its pixels for each of them
LEFT, TOP = 22, 22
VISIBLE, BESIDE, HIDDEN, INK = "#3949ab", "#8e9ae0", "#eceff1", "#607d8b"


def some_scores(length: int) -> Tensor:
    """Return scores `[1, 1, length]` without ties that look random, and are the same everywhere."""
    return ((torch.arange(length) * 7919 + 13) % 1009 / 1009.0)[None, None]


def masks() -> Iterator[tuple[str, str, TileMask, TileMask | None]]:
    """Yield the name of each picture, what it shows, the mask, and the part of it to be drawn in the strong colour."""
    every, place = torch.ones(1, 1, SIZE, SIZE, dtype=torch.bool), torch.arange(SIZE)
    yield "causal", "is_causal=True", prepare_mask(every, is_causal=True), None
    shorter = every[:, :, : SIZE // 2]
    yield "bottom-right", 'causal_from="bottom_right"', prepare_mask(shorter, is_causal=True), None
    top_left = prepare_mask(shorter, is_causal=True, causal_from="top_left")
    yield "top-left", 'causal_from="top_left"', top_left, None
    window = prepare_mask(every, is_causal=True, window_size=(5, None))
    yield "window", "window_size=(5, None)", window, None
    blocks = ((place[:, None] // 4 * 5 + place // 4 * 3) % 7 < 3)[None, None]
    yield "tensor", "a mask tensor", prepare_mask(blocks, is_causal=True), None
    padding = torch.stack([place < 17, place >= 5])
    yield "padding", "padding on the right", prepare_mask(padding[:1], seqlen_q=SIZE, is_causal=True), None
    yield "left-padding", "padding on the left", prepare_mask(padding[1:], seqlen_q=SIZE, is_causal=True), None
    documents = torch.bucketize(place, torch.tensor([7, 15]), right=True)[None]
    yield "documents", "documents", prepare_mask(documents=documents, is_causal=True), None
    start = place[None, None].int()
    end = (start + 4 + (start * 5) % 9).clamp(max=SIZE)
    intervals = prepare_mask(intervals=(start, end), seqlen_q=SIZE)
    yield "intervals", "intervals", intervals, None
    gap = (start + 2, start + 4)
    yield "hidden", "intervals with a gap", prepare_mask(intervals=(start, end), hidden=gap, seqlen_q=SIZE), None
    scores = some_scores(SIZE)
    yield "dynamic", "dynamic_mask(scores, 4)", dynamic_mask(scores, 4), None
    beside = dynamic_mask(scores, 4, keep_first=2, keep_last=3)
    yield "dynamic-beside", "keep_first=2, keep_last=3", beside, dynamic_mask(scores, 4)
    yield "dynamic-documents", "with documents", dynamic_mask(scores, 4, documents=documents), None
    yield "dynamic-full", "is_causal=False", dynamic_mask(scores, 4, is_causal=False), None
    best = (scores[0, 0] * (1 + (place[:, None] // 8 * 5) % 7)).fmod(
        1.0
    )  # [queries, keys], alike in neighbouring queries
    best = best.masked_fill(place > place[:, None], -1.0)
    yield "selection", "the best 5 keys", selection_mask(best.topk(5).indices[None, None]), None
    of_blocks = best.unflatten(-1, (SIZE // 4, 4)).amax(-1).topk(2).indices[None, None]
    yield "selection-blocks", "2 blocks of 4 keys", selection_mask(of_blocks, block=4), None
    part = dynamic_mask(scores, 4).queries(12, SIZE)
    yield "slice", "mask.queries(12, 24)", part, None


def _rectangles(classes: Tensor, cell: int, colours: dict[int, str]) -> Iterator[str]:
    """Yield a rectangle for each run of equal cells of a row of `[rows, columns]`."""
    for row, line in enumerate(classes.tolist()):
        first = 0
        for column in range(1, len(line) + 1):
            if column < len(line) and line[column] == line[first]:
                continue
            if line[first] in colours:
                x, y, width = LEFT + first * cell, TOP + row * cell, (column - first) * cell
                yield f'<rect x="{x}" y="{y}" width="{width}" height="{cell}" fill="{colours[line[first]]}"/>'
            first = column


def drawing(title: str, classes: Tensor, cell: int, colours: dict[int, str]) -> str:
    """Return an SVG picture of `[queries, keys]`: a colour for each class, lines between the cells."""
    rows, columns = classes.shape
    width, height = columns * cell, rows * cell
    lines = "".join(f"M{LEFT + c * cell} {TOP}v{height}" for c in range(columns + 1))
    lines += "".join(f"M{LEFT} {TOP + r * cell}h{width}" for r in range(rows + 1))
    middle, style = TOP + height // 2, f'fill="{INK}" font-family="sans-serif" font-size="11" text-anchor="middle"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + LEFT + 4}" height="{height + TOP + 4}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect x="{LEFT}" y="{TOP}" width="{width}" height="{height}" fill="{HIDDEN}"/>',
        *_rectangles(classes, cell, colours),
        f'<path d="{lines}" stroke="#fff" stroke-width="1" fill="none"/>',
        f'<text x="{LEFT + width // 2}" y="14" {style}>keys</text>',
        f'<text x="13" y="{middle}" transform="rotate(-90 13 {middle})" {style}>queries</text>',
        "</svg>\n",
    ]
    return "\n".join(parts)


def pictures() -> dict[str, str]:
    """Return the text of each picture, by the name of its file."""
    drawn = {}
    for name, title, mask, strong in masks():
        classes = mask.to_dense()[0, 0].int()
        if strong is not None:
            classes += strong.to_dense()[0, 0].int()  # 2 where both show the key
        colours = {1: VISIBLE} if strong is None else {1: BESIDE, 2: VISIBLE}
        drawn[f"{name}.svg"] = drawing(title, classes, CELL, colours)
    documents = torch.bucketize(torch.arange(1536), torch.tensor([400, 1024]), right=True)[None]
    tiles = flex.tile_classes(prepare_mask(documents=documents, is_causal=True))[0, 0]
    drawn["tiles.svg"] = drawing("tiles of documents", tiles, 16, {PARTIAL: BESIDE, FULL: VISIBLE})
    return drawn


def schemas() -> str:
    """Return the schema of each operator."""
    texts = (f"dmattn::{name}{schema}" for name, schema in (ops.SCHEMAS | ops.CHANGING | ops.COMPOSITES).items())
    return "```text\n" + "\n".join(textwrap.fill(text, 100, subsequent_indent="    ") for text in texts) + "\n```\n"


def budget() -> str:
    """Return eps of the error budget for each dtype."""
    rows = (f"| {str(dtype).removeprefix('torch.')} | {eps:g} |\n" for dtype, eps in EPS.items())
    return "| dtype | eps |\n| --- | --- |\n" + "".join(rows)


def compiled() -> str:
    """Return how many programs of GPU kernels are compiled for each architecture, by version of Triton."""
    found: dict[str, Counter[str]] = {}
    for path in sorted(TABLES.glob("*.json")):
        table = json.loads(path.read_text())
        counts = found.setdefault(table["triton"], Counter())
        for row, specializations in table["rows"].items():
            counts[row.split()[0]] += sum(len(kernels) for name, kernels in specializations.items() if name != SOURCE)
    architectures = sorted({name for counts in found.values() for name in counts}, key=lambda name: float(name[2:]))
    lines = [["compiled for", *(f"triton {version}" for version in found)], ["---"] * (1 + len(found))]
    lines += [[f"SM {name[2:]}", *(str(counts[name]) for counts in found.values())] for name in architectures]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def sources() -> str:
    """Return what the result files whose tables `performance.md` shows say of themselves."""
    shown = readme_tables.MARKED.finditer((DOCS / "performance.md").read_text(encoding="utf-8"))
    lines = [["file", "machine", "date", "dmattn_ops", "torch", "command"], ["---"] * 6]
    for name in sorted({found[2] for found in shown}):
        made = json.loads((readme_tables.RESULTS / name).read_text())
        versions = [made["versions"][library] for library in ("dmattn-ops", "torch")]
        machine = made.get("gpu") or made.get("cpu") or "CPU"
        link = f"[{name}](../benchmarks/results/{name})"
        lines.append([link, machine, made["date"], *versions, f"`{made['command']}`"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


BLOCKS = {"schemas": schemas, "budget": budget, "compiled": compiled, "sources": sources}


def filled(text: str) -> str:
    """Return the text of a page with everything that is generated made anew."""
    text = GENERATED.sub(lambda found: found[1] + BLOCKS[found[2]]() + found[4], text)
    return readme_tables.filled(text)


def operators_header() -> str:
    """Return the schemas as C++ has them: what the library defines where no Python runs."""
    texts = "".join(f'    R"({name}{text})",\n' for name, text in (ops.SCHEMAS | ops.EXPORTED).items())
    return (
        "// The schemas of the operators, of dmattn_ops/ops/schemas.py: `python docs/generate.py` writes this file.\n"
        "#pragma once\n\nnamespace dmattn {\n\n// clang-format off\nconstexpr const char* kSchemas[] = {\n"
        f"{texts}}};\n// clang-format on\n\n}}  // namespace dmattn\n"
    )


def main() -> None:
    """Write pictures, pages and the schemas of the C++ library."""
    OPERATORS_HEADER.write_text(operators_header(), encoding="utf-8")
    (DOCS / "pictures").mkdir(exist_ok=True)
    for name, text in pictures().items():
        (DOCS / "pictures" / name).write_text(text, encoding="utf-8")
    for page in sorted(DOCS.glob("*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
