"""The HTML page of a comparison of losses. It needs no other file."""

from __future__ import annotations

from markupsafe import Markup

from tools.reports.page_style import STYLE
from tools.reports.template import compiled
from tools.run_comparison.loss_comparison import Comparison
from tools.run_comparison.loss_picture import panel_svgs
from tools.run_comparison.loss_table import finding_row, summary, warnings

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Loss parity</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<h1>Loss parity</h1>
<p class="verdict {{ 'good' if passed else 'bad' }}">
<strong>{{ 'pass' if passed else 'FAIL' }}</strong></p>
<p class="lead">{{ summary }}</p>
{% if warnings %}
<div class="note">
{% for line in warnings %}<p>{{ line }}</p>
{% endfor %}
</div>
{% endif %}
{% for name, good, rows in candidates %}
<h2>{{ name }}: {{ 'pass' if good else 'FAIL' }}</h2>
<div class="scroll"><table>
<thead><tr><th>criterion</th><th class="n">value</th><th class="n">bound</th><th></th>
<th></th></tr></thead>
<tbody>
{% for criterion, value, bound, verdict, detail in rows %}
<tr><td>{{ criterion }}</td><td class="n">{{ value }}</td><td class="n">{{ bound }}</td>
<td>{{ verdict }}</td><td>{{ detail }}</td></tr>
{% endfor %}
</tbody>
</table></div>
{% endfor %}
{% for caption, drawing in panels %}
<figure>{{ drawing }}</figure>
<p class="caption">{{ caption }}</p>
{% endfor %}
</main>
</body>
</html>
"""


def render_page(comparison: Comparison) -> str:
    return compiled(TEMPLATE).render(
        passed=comparison.passed,
        summary=summary(comparison),
        warnings=warnings(comparison),
        candidates=[
            (verdict.candidate.name, verdict.passed, [finding_row(f) for f in verdict.findings])
            for verdict in comparison.verdicts
        ],
        style=Markup(STYLE),
        # Drawn by us from numbers and from text that matplotlib has escaped.
        panels=[(caption, Markup(drawing)) for caption, drawing in panel_svgs(comparison)],
    )
