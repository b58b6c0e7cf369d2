"""A report as one self-contained page."""

from __future__ import annotations

import html
import json

from .table import Report

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1b1f24;background:#fff}
table{border-collapse:collapse;width:100%}
th,td{padding:.35rem .6rem;border-bottom:1px solid #d8dee4;text-align:left;vertical-align:top}
td.seen{font-variant-numeric:tabular-nums;white-space:nowrap;max-width:18rem;overflow:hidden;text-overflow:ellipsis}
small{color:#57606a}.passed b{color:#1a7f37}.failed b,.error b{color:#cf222e}.skipped b{color:#6e7781}.taste b{color:#9a6700}
@media (prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}th,td{border-color:#30363d}small{color:#8b949e}}
"""


def render_page(report: Report) -> str:
    rows = []
    for each in report.results:
        mood = "taste" if each.word == "taste" else each.status
        word = f"{each.status} <small>(taste)</small>" if each.taste else each.status
        name = ", ".join(filter(None, (each.name, each.engine)))
        rows.append(
            f'<tr class="{mood}"><td><b>{word}</b></td>'
            f"<td>{html.escape(name)}<br><small>{html.escape(each.reason)}</small></td>"
            f'<td class="seen">{html.escape(each.shown)}</td><td>{html.escape(each.note)}</td></tr>'
        )
    settings = html.escape(json.dumps(report.list_settings()))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(report.target)}</title><style>{STYLE}</style><h1>{html.escape(report.target)}</h1>"
        f"<p>{html.escape(report.summary())}. <small>Settings beside the defaults: {settings}</small></p>"
        f"<table><tr><th>result<th>check<th>seen<th>what is wrong, or why it was skipped</tr>{''.join(rows)}</table></html>\n"
    )
