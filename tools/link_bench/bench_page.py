"""The HTML page of a run: pictures, every number, and what places them. It needs no other file."""

from __future__ import annotations

from markupsafe import Markup

from tools.link_bench.bench_picture import bandwidth_svg, latency_svg
from tools.link_bench.bench_record import Record
from tools.link_bench.bench_table import COLUMNS, explanation, link_lines
from tools.reports.page_style import STYLE
from tools.reports.template import compiled

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Links on {{ facts.device }}</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<h1>Links between two processes on {{ facts.device }}</h1>
{% if notes %}
<div class="note">
{% for note in notes %}<p>{{ note }}</p>
{% endfor %}
</div>
{% endif %}
<h2>Bandwidth</h2>
<figure>{{ bandwidth }}</figure>
<p class="caption">Messages queued back to back one way. Dashed: the bare path without us.</p>
<h2>Latency</h2>
<figure>{{ latency }}</figure>
<p class="caption">Half a round trip, both ends having the tensor in hand.</p>
<h2>Every figure</h2>
<div class="scroll"><table>
<thead><tr>{% for title, _ in columns %}
<th{{ ' class="n"' | safe if loop.index != 2 }}>{{ title }}</th>{% endfor %}</tr></thead>
<tbody>
{% for point in points %}
<tr>{% for _, cell in columns %}
<td{{ ' class="n"' | safe if loop.index != 2 }}>{{ cell(point) }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% for line in explanation %}
<p class="caption">{{ line }}</p>
{% endfor %}
<h2>The links</h2>
{% for line in links %}
<p>{{ line }}</p>
{% endfor %}
<h2>The run</h2>
<dl>{% for name, value in facts.items() if value is not none and name != 'command' %}
<dt>{{ name.replace('_', ' ') }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
<pre>{{ facts.command }}</pre>
</main>
</body>
</html>
"""


def render_page(record: Record) -> str:
    return compiled(TEMPLATE).render(
        facts=record.facts,
        notes=record.notes,
        columns=COLUMNS,
        points=sorted(record.points, key=lambda point: point.nbytes),
        explanation=explanation(record),
        links=link_lines(record),
        style=Markup(STYLE),
        # Drawn by us from numbers and from text that matplotlib has escaped.
        bandwidth=Markup(bandwidth_svg(record)),
        latency=Markup(latency_svg(record)),
    )
