"""Draws docs/speed.svg from bench/results/step-2ranks.json: a training step with fastcomm, in
percent of the same step with DDP. For light and dark pages, and with text that can be searched.

    python -m ci.pictures
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/step-2ranks.json"
PICTURE = ROOT / "docs/speed.svg"
LABELS = {
    "mlp": "MLP, 8.4 M parameters",
    "gpt2": "GPT-2 small, 124 M",
    "transformer": "transformer, 18.9 M",
    "conv": "conv net, 0.4 M",
}
LEFT, WIDTH, TOP, ROW = 190, 400, 44, 46
STYLE = """<style>
  text { font: 14px system-ui, sans-serif; fill: #1f2328 }
  .small { font-size: 12px; fill: #59636e }
  .ddp { fill: #b6bcc3 }
  .fastcomm { fill: #1f6feb }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .small { fill: #9198a1 }
    .ddp { fill: #59626d }
    .fastcomm { fill: #4493f8 }
  }
</style>"""


def drawn(results: str) -> str:
    measured = json.loads(results)
    height = TOP + ROW * len(LABELS) + 26
    title = "Time of a training step: fastcomm in percent of DDP over Gloo"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 {height}" role="img">',
        f"<title>{title}</title>",
        STYLE,
        f'<text x="0" y="18" font-weight="600">{title}</text>',
    ]
    for i, (name, label) in enumerate(LABELS.items()):
        y = TOP + ROW * i
        took = {way: of[1] for way, of in measured["models"][name]["quartiles_ms"].items()}
        lines.append(f'<text x="{LEFT - 10}" y="{y + 20}" text-anchor="end">{label}</text>')
        for way, y_bar in (("ddp", y), ("fastcomm", y + 16)):
            share = took[way] / took["ddp"]
            width = round(WIDTH * share)
            lines += [
                f'<rect class="{way}" x="{LEFT}" y="{y_bar}" width="{width}" height="14"/>',
                f'<text class="small" x="{LEFT + width + 6}" y="{y_bar + 11}">'
                f"{'DDP' if way == 'ddp' else 'fastcomm'} {share:.0%}, {took[way]:.0f} ms</text>",
            ]
    machine = measured["machine"]
    lines += [
        f'<text class="small" x="0" y="{height - 6}">Medians, {measured["ranks"]} processes on '
        f"{machine['cores']} cores of an {machine['cpu']}, fastcomm {machine['fastcomm']}, torch "
        f"{machine['torch'].partition('+')[0]}, {machine['date'][:10]}</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(drawn(RESULTS.read_text()))
