"""The HTML page of a comparison. The template is Python text, so that it travels with the code."""

from __future__ import annotations

import shlex

from markupsafe import Markup

from hetero.words import size_text
from tools.reports.charts import loss_chart
from tools.reports.page_style import STYLE
from tools.reports.run_pair import WARMUP_ITERATIONS, Comparison, RunRecord
from tools.reports.template import compiled

COMMAND_COLUMNS = 100

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ c.title }}</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<header>
<h1>{{ c.title }}</h1>
<p class="verdict {{ 'good' if c.bit_identical else 'bad' }}">
bit-identical: <strong>{{ 'yes' if c.bit_identical else 'no' }}</strong></p>
<p class="lead">
{% if c.bit_identical %}
Every loss of {{ c.iterations }} iterations and every one of {{ count(c.hetero.parameters) }}
weights is the same, bit for bit, in the mixed run and in the homogeneous one.
{% else %}
Losses {{ 'are equal' if c.losses_identical else 'differ' }}, weights
{{ 'are equal' if c.weights_identical else 'differ' }} between the mixed and the homogeneous run.
{% endif %}
</p>
{% if c.simulated %}
<p class="note"><strong>Simulated.</strong> One machine played both vendors: no NVIDIA and no AMD
GPU took part. The training, the processes and the bytes between them are real; the speeds are
those of this machine's CPU and say nothing about GPUs.</p>
{% endif %}
</header>

<section class="tiles">
<div><b>{{ number(c.max_abs_loss_difference) }}</b><span>largest loss difference</span></div>
<div><b>{{ '%.3f' % c.hetero.loss[0] }} → {{ '%.3f' % c.hetero.loss[-1] }}</b>
<span>loss, first to last</span></div>
<div><b>{{ count(c.hetero.tokens_per_s) }}</b><span>tokens/s, mixed</span></div>
<div><b>{{ size(c.link_bytes) }}</b><span>across the vendor boundary</span></div>
</section>

<section>
<h2>The pipeline</h2>
<div class="pipeline">
{% for stage in c.hetero.stages %}
<div class="stage">
<b>{{ stage.vendor }}</b>{% if stage.simulated %} <em>simulated</em>{% endif %}
<span>stage {{ stage.stage }} · {{ stage.layers | join(' + ') }} layers</span>
<span>ranks {{ stage.ranks | join(', ') }}</span>
</div>
{% if not loop.last %}
<div class="wire"><span>{{ c.transport }}</span><i>⇄</i>
<span>{{ size(c.link_bytes_per_iteration) }} per iteration</span></div>
{% endif %}
{% endfor %}
</div>
</section>

<section>
<h2>Loss</h2>
<figure>{{ loss }}</figure>
<p class="caption">Above, the loss of both runs; below, mixed minus homogeneous, over the same
iterations: {% if c.losses_identical %}zero at every one.
{% else %}at most {{ number(c.max_abs_loss_difference) }}.{% endif %}</p>
</section>

<section>
<h2>Tokens per second</h2>
<table class="bars">
{% for kind, run in runs %}
<tr><th>{{ run.title }}</th>
<td class="bar"><div class="{{ kind }}" style="width: {{ share(run) }}%"></div></td>
<td class="n">{{ count(run.tokens_per_s) }}</td></tr>
{% endfor %}
</table>
<p class="caption">Median of the iterations{{ ' after the first %d' % warmup if warmup }}.
{% if c.simulated %}Both runs did the same work on the same CPU, and whatever else it had to do
meanwhile moves these numbers.{% endif %}</p>
</section>

<section>
<h2>What crossed between the vendors</h2>
<div class="scroll"><table>
<thead><tr><th>from</th><th>to</th><th>transport</th><th class="n">messages</th>
<th class="n">bytes</th><th class="n">bytes per iteration</th><th class="n">waited</th></tr></thead>
<tbody>
{% for link in c.hetero.links %}
<tr><td>rank {{ link.rank }} (stage {{ link.stage }})</td>
<td>rank {{ link.peer }} (stage {{ link.peer_stage }})</td><td>{{ link.transport }}</td>
<td class="n">{{ count(link.messages_sent) }}</td><td class="n">{{ count(link.bytes_sent) }}</td>
<td class="n">{{ count(link.bytes_sent / c.iterations) }}</td>
<td class="n">{{ '%.1f' % link.wait_seconds }} s</td></tr>
{% endfor %}
</tbody>
<tfoot><tr><td>all</td><td></td><td>{{ c.transport }}</td>
<td class="n">{{ count(c.link_messages) }}</td><td class="n">{{ count(c.link_bytes) }}</td>
<td class="n">{{ count(c.link_bytes_per_iteration) }}</td><td></td></tr></tfoot>
</table></div>
<p class="caption">{{ c.transport }}: {{ c.transport_description }}. The shapes of activations and
gradients say {{ count(c.expected_link_bytes) }} bytes; {{ count(c.link_bytes) }} were
counted{{ ', the same' if c.link_bytes == c.expected_link_bytes else ': they differ' }}. Waiting is
the time a rank was blocked on messages it was to receive, most of it while its peer computed.</p>
</section>

<section>
<h2>Which rank was what</h2>
{% for kind, run in runs %}
<h3>{{ run.title }}</h3>
<div class="scroll"><table>
<thead><tr><th>rank</th><th>stage</th><th>played</th><th>layers</th>
<th class="n">parameters of the stage</th><th>host</th><th>really ran on</th></tr></thead>
<tbody>
{% for rank in run.ranks %}
{% set stage = run.stages[rank.stage] %}
<tr><td>{{ rank.rank }}</td><td>{{ rank.stage }}</td>
<td>{{ rank.vendor }}{{ ' (simulated)' if rank.simulated }}</td>
<td>{{ stage.layers | join('+') }}</td><td class="n">{{ count(stage.parameters) }}</td>
<td>{{ rank.host }}</td><td>{{ rank.device }}</td></tr>
{% endfor %}
</tbody>
</table></div>
{% endfor %}
</section>

<section>
<h2>The job</h2>
<dl>{% for name, value in c.facts %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}
{% for kind, run in runs %}<dt>weights, {{ run.title }}</dt>
<dd class="mono">sha256 {{ run.weights_sha256 }}</dd>{% endfor %}
<dt>versions</dt><dd>{% for name, value in c.versions %}{{ name }} {{ value }}
{%- if not loop.last %}, {% endif %}{% endfor %}</dd></dl>
{% for kind, run in runs %}
<h3>{{ run.title }}, {{ '%.0f' % run.seconds }} s</h3>
<pre>{{ command(run) }}</pre>
{% endfor %}
</section>
</main>
</body>
</html>
"""


def render_page(comparison: Comparison) -> str:
    hetero, homogeneous = comparison.hetero, comparison.homogeneous
    fastest = max(hetero.tokens_per_s, homogeneous.tokens_per_s) or 1.0
    return compiled(TEMPLATE).render(
        c=comparison,
        runs=[("mixed", hetero), ("baseline", homogeneous)],
        style=Markup(STYLE),
        # Drawn by us from numbers and from text that matplotlib has escaped.
        loss=Markup(
            loss_chart(
                hetero.loss,
                homogeneous.loss,
                comparison.differences,
                (hetero.title, homogeneous.title),
            )
        ),
        share=lambda run: round(100 * run.tokens_per_s / fastest, 1),
        warmup=_warmup(hetero),
        command=command_text,
        count=lambda value: f"{value:,.0f}",
        number=number_text,
        size=size_text,
    )


def _warmup(run: RunRecord) -> int:
    return WARMUP_ITERATIONS if len(run.iteration_tokens_per_s) > WARMUP_ITERATIONS else 0


def number_text(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}"


def command_text(run: RunRecord) -> str:
    """The command as a shell takes it, broken between flags into lines that fit the page."""
    lines = [" ".join(f"{name}={shlex.quote(value)}" for name, value in run.environment)]
    for group in _flag_groups(run.command):
        if lines[-1] and len(lines[-1]) + len(group) < COMMAND_COLUMNS:
            lines[-1] += " " + group
        else:
            lines.append(group)
    return " \\\n  ".join(line for line in lines if line)


def _flag_groups(command: tuple[str, ...]) -> list[str]:
    """Each flag with its values; the words before the first flag one by one."""
    groups: list[str] = []
    for word in command:
        if groups and groups[-1].startswith("--") and not word.startswith("--"):
            groups[-1] += " " + shlex.quote(word)
        else:
            groups.append(shlex.quote(word))
    return groups
