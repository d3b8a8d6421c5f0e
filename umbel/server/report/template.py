"""The page of a report, for Jinja2. It is Python because the bundle has no HTML."""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }} · umbel</title>
<style>
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1b1f24; --muted: #59626d; --line: #dce0e5; --soft: #f5f7f9; --rest: #7d8691;
  --alarm: #fdf1e7; --alarm-line: #d55e00; --none-line: #b3261e; --holds-line: #00734f;
  --series-1: #0072b2; --series-2: #d55e00; --series-3: #008a63; --series-4: #b04a86;
  --series-5: #946800; --series-6: #2a93d1; --series-7: #7a2f4d; --series-8: #55606b;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --ink: #e9ecef; --muted: #a3adb8; --line: #333a42; --soft: #1c2126; --rest: #8c96a1;
    --alarm: #2d1f14; --alarm-line: #f08a3c; --none-line: #f2857c; --holds-line: #35c296;
    --series-1: #4aa8e8; --series-2: #f08a3c; --series-3: #35c296; --series-4: #e08fbd;
    --series-5: #e3b341; --series-6: #9bd6fa; --series-7: #d1667f; --series-8: #b9c2cc;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 3.5rem 1.25rem 5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 3.75rem 0 1.1rem; letter-spacing: -.005em; }
h3 { font-size: 1rem; margin: 0 0 .5rem; }
p { margin: 0 0 .8rem; max-width: 44rem; }
.kicker { color: var(--muted); margin: .4rem 0 0; overflow-wrap: anywhere; }
.lead { font-size: 1.12rem; margin-top: 1.4rem; }
.note, figcaption { color: var(--muted); font-size: .88rem; line-height: 1.45; }
.alarms { background: var(--alarm); border-left: 4px solid var(--alarm-line); border-radius: 3px;
  padding: 1.1rem 1.4rem; margin: 1.8rem 0; }
.alarms h2 { margin: 0 0 .5rem; font-size: 1.1rem; }
.alarms ul { margin: 0; padding-left: 1.1rem; }
.alarms li { margin: .5rem 0; max-width: 46rem; }
.verdict { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 1.2rem; margin: 1.8rem 0; }
.verdict > div { background: var(--soft); border-left: 4px solid var(--line); border-radius: 3px;
  padding: 1rem 1.3rem; }
.verdict .none { border-color: var(--none-line); }
.verdict .weak { border-color: var(--alarm-line); }
.verdict .holds { border-color: var(--holds-line); }
.verdict h2, .verdict h3 { font-size: .95rem; font-weight: 600; line-height: 1.4; letter-spacing: 0;
  color: var(--muted); margin: 0; }
.verdict .value { font-size: 1.7rem; line-height: 1.3; margin: .2rem 0 .4rem; overflow-wrap: anywhere; }
.verdict p { margin: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 1.5rem; margin: 2.2rem 0 0; }
.tiles div { border-top: 2px solid var(--ink); padding-top: .6rem; display: flex; flex-direction: column; }
.tiles dt { color: var(--muted); font-size: .88rem; }
.tiles dd { margin: 0; }
.tiles .value { font-size: 1.7rem; line-height: 1.3; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.tiles .remark { color: var(--muted); font-size: .88rem; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 2.8rem 2.5rem; align-items: start; }
figure { margin: 0; min-width: 0; }
figure { overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 19.5rem; max-width: 26rem; height: auto; }
svg text { font-family: system-ui, sans-serif; font-variant-numeric: tabular-nums; }
svg * { stroke-linejoin: round; }
figcaption { margin-top: .6rem; }
.after, .under { margin-top: 1rem; }
.columns { columns: 2 24rem; column-gap: 2.5rem; }
.columns table { width: 100%; border-collapse: separate; border-spacing: 0; }
.columns tr { break-inside: avoid; }
.aside { margin: 2.2rem 0 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .38rem 1.5rem .38rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; }
tbody th { font-weight: 400; white-space: nowrap; }
.numbers th + th, .numbers td { text-align: right; padding: .38rem 0 .38rem .9rem; }
.numbers td { white-space: nowrap; }
.wraps tbody th, .wraps .numbers td { white-space: normal; }
.numbers thead th { color: var(--muted); font-weight: 400; vertical-align: bottom; }
.pairs tbody th { color: var(--muted); }
.pairs td { overflow-wrap: anywhere; }
tr.best th, tr.best td { font-weight: 700; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.rules { padding-left: 1.1rem; max-width: 46rem; }
.scroll { overflow-x: auto; }
.scroll:focus-visible, summary:focus-visible { outline: 2px solid var(--series-1); outline-offset: 3px; }
.key { width: .95em; height: .95em; vertical-align: -.08em; margin-right: .15em; }
summary { cursor: pointer; font-weight: 600; padding: .4rem 0; }
details { margin-bottom: 1rem; }
details > *:not(summary) { margin-top: .6rem; }
code { font: .92em ui-monospace, monospace; overflow-wrap: anywhere; }
@media (max-width: 46rem) {
  main { padding-top: 2rem; }
  .grid { grid-template-columns: minmax(0, 1fr); }
  h2 { margin-top: 2.8rem; }
}
/* The narrowest phones show figures to the edge, in full size. */
@media (max-width: 22rem) { main { padding-left: .25rem; padding-right: .25rem; } }
@media print {
  :root { color-scheme: light; }
  @page { margin: 14mm; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  h1 { font-size: 1.5rem; }
  h2 { margin: 1.6rem 0 .7rem; }
  .columns { columns: 2; break-inside: avoid; }
  .numbers th + th, .numbers td { padding-left: .5rem; }
  table { font-size: 8.5pt; }
  .grid { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1.4rem 1.6rem; }
  .tiles { grid-template-columns: repeat(4, 1fr); }
  h1, h2, h3, summary { break-after: avoid; }
  figure, .tiles, .alarms, tr { break-inside: avoid; }
  thead { display: table-header-group; }
  .scroll { overflow: visible; }
  details:not([open]) { display: none; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
</style>
</head>
<body>
{% macro picture(it) %}
<figure>
<h3>{{ it.title }}</h3>
{{ it.svg }}
<figcaption>{{ it.caption }}</figcaption>
</figure>
{% endmacro %}
{% macro numbers(table, label) %}
<div class="scroll" tabindex="0" role="region" aria-label="{{ label }}">
<table class="numbers">
<thead><tr>{% for cell in table.head %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
{% set best = loop.index0 == table.marked %}
<tr{% if best %} class="best"{% endif %}><th scope="row">{{ row[0] }}{% if best %} (best){% endif %}</th>
{%- for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
{% if table.note %}
<p class="note under">{{ table.note }}</p>
{% endif %}
{% endmacro %}
{% macro pairs(rows, label) %}
<table class="pairs">
<caption class="hidden">{{ label }}</caption>
<tbody>
{% for key, value in rows %}
<tr><th scope="row">{{ key }}</th><td>{{ value }}</td></tr>
{% endfor %}
</tbody>
</table>
{% endmacro %}
<main>
<header>
<h1>{{ title }}</h1>
<p class="kicker">{% if began %}{{ began }}<br>{% endif %}{{ name }}</p>
<section class="verdict" aria-labelledby="verdict">
<div class="{{ verdict.kind }}">
<h2 id="verdict">Privacy: guaranteed between any two data sets</h2>
<p class="value">{{ verdict.value }}</p>
<p>{{ verdict.text }}</p>
</div>
{% if verdict.paper_value %}
<div>
<h3>A heuristic, not a guarantee</h3>
<p class="value">{{ verdict.paper_value }}</p>
<p>{{ verdict.paper_text }}</p>
</div>
{% endif %}
</section>
{% if alarms %}
<section class="alarms" aria-labelledby="alarms">
<h2 id="alarms">Check this before you use the result</h2>
<ul>
{% for alarm in alarms %}
<li><strong>{{ alarm.title }}.</strong> {{ alarm.text }}</li>
{% endfor %}
</ul>
</section>
{% endif %}
</header>

<section aria-labelledby="result">
<h2 id="result">Result</h2>
<p class="lead">{{ lead }}</p>
<dl class="tiles">
{% for what, value, remark in tiles %}
<div><dt>{{ what }}</dt><dd class="value">{{ value }}</dd><dd class="remark">{{ remark }}</dd></div>
{% endfor %}
</dl>
{% if comparison %}
<h3 class="aside">Beside other runs</h3>
<div class="wraps">{{ numbers(comparison, "Beside other runs") }}</div>
{% endif %}
{% if learning %}
<div class="grid aside">
{% for it in learning %}
{{ picture(it) }}
{% endfor %}
</div>
{% endif %}
</section>

{% if spread %}
<section aria-labelledby="spread">
<h2 id="spread">Spread over clients</h2>
<div class="grid">
{{ picture(spread) }}
{% if spread_table %}
<div>
<h3>At best</h3>
{{ numbers(spread_table, "Clients with the best hypotheses") }}
</div>
{% endif %}
</div>
</section>
{% endif %}

<section aria-labelledby="hypotheses">
<h2 id="hypotheses">The hypotheses</h2>
{{ numbers(hypotheses, "What became of the hypotheses") }}
{% if truth %}
<p class="after">
{% for where, j, away in truth %}
True parameters {{ where }}: hypothesis {{ j }} is {{ "%.3f" | format(away) }} away.<br>
{% endfor %}
</p>
{% endif %}
{% if pictures %}
<div class="grid aside">
{% for it in pictures %}
{{ picture(it) }}
{% endfor %}
</div>
{% endif %}
</section>

{% if planes %}
<section aria-labelledby="plane">
<h2 id="plane">What clients released</h2>
<div class="grid">
{% for it in planes %}
{{ picture(it) }}
{% endfor %}
</div>
</section>
{% endif %}

{% for added in sections %}
<section aria-labelledby="added-{{ loop.index }}">
<h2 id="added-{{ loop.index }}">{{ added.title }}</h2>
{% if added.picture %}
<div class="grid"><figure>{{ added.picture | safe }}</figure></div>
{% endif %}
{% for paragraph in added.paragraphs %}
<p>{{ paragraph }}</p>
{% endfor %}
</section>
{% endfor %}

<section aria-labelledby="privacy">
<h2 id="privacy">What the privacy is worth</h2>
<div class="grid">
{% if spending %}
{{ picture(spending) }}
{% endif %}
<div>
<h3>What it means</h3>
{% for sentence in spent_means %}
<p>{{ sentence }}</p>
{% endfor %}
</div>
</div>
</section>

<section aria-labelledby="run">
<h2 id="run">What was run</h2>
<div class="columns">{{ pairs(facts, "What was run") }}</div>
</section>

<section aria-labelledby="details">
<h2 id="details">Details</h2>
<details>
<summary>All rounds</summary>
{{ numbers(rounds, "All rounds") }}
</details>
<details>
<summary>What gives an alarm</summary>
<ul class="rules">
<li>Hypotheses whose numbers are infinite or undefined.</li>
<li>A validation without a finite loss, or no validation with a lower loss than the first.</li>
<li>With more than one hypothesis: one that got no release, or one that got nearly all (clusters collapsed), at the end
of the training. The end is the last tenth of the rounds that moved the hypotheses, but at least {{ rules.rounds }} of
them, and as many as hold {{ rules.each }} releases for each hypothesis.
{% if rounds_judged %}Here that is the last {{ rounds_judged }} of these rounds.
{% else %}This run is too short for this check.
{% endif %}</li>
<li>A hypothesis whose distance to the nearest other one ends below {{ rules.drifted }} of its maximum in the run;
both are medians over {{ rules.rounds }} successive rounds.</li>
<li>A round with fewer releases than min-releases, and a node that gave no usable answer to training.</li>
</ul>
{% if not alarms %}
<p>Nothing of this kind was found in this run.</p>
{% endif %}
</details>
<details>
<summary>Versions</summary>
{{ pairs(versions, "Versions") }}
</details>
</section>

<section aria-labelledby="config">
<h2 id="config">Run config</h2>
{% if config %}
<div class="columns">{{ pairs(config, "What was set") }}</div>
{% else %}
<p>All keys are at their defaults.</p>
{% endif %}
<details class="aside">
<summary>{{ defaults | length }} keys at their defaults</summary>
<div class="columns">{{ pairs(defaults, "Defaults") }}</div>
</details>
</section>
</main>
</body>
</html>
"""
