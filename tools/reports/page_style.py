"""The look of our HTML reports, in the reader's light or dark colours."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfaf7; --panel: #ffffff; --ink: #1d1f24; --ink-soft: #5d636e; --rule: #e2e0da;
  --mixed: #b3402a; --baseline: #a9c3e6; --good: #1d6f42; --good-paper: #e4f3e9;
  --bad: #9a3412; --bad-paper: #fdeadf; --note-paper: #f6efd9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15171b; --panel: #1c1f24; --ink: #e8e6e1; --ink-soft: #a3a8b3; --rule: #33373f;
    --mixed: #ff9a7d; --baseline: #3d5f8f; --good: #7fd6a3; --good-paper: #17301f;
    --bad: #ffb38f; --bad-paper: #3a2016; --note-paper: #322c18;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 940px; margin: 0 auto; padding: 40px 24px 72px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 16px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 44px 0 12px; }
h3 { font-size: 15px; margin: 20px 0 6px; color: var(--ink-soft); font-weight: 600; }
p { margin: 0 0 12px; max-width: 72ch; }
.verdict {
  display: inline-block; padding: 5px 14px; border-radius: 999px; font-size: 18px;
}
.verdict.good { background: var(--good-paper); color: var(--good); }
.verdict.bad { background: var(--bad-paper); color: var(--bad); }
.lead { font-size: 17px; }
.note { background: var(--note-paper); border-radius: 8px; padding: 12px 16px; max-width: none; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px;
  margin-top: 24px; }
.tiles div, .stage { background: var(--panel); border: 1px solid var(--rule); border-radius: 10px;
  padding: 14px 16px; }
.tiles b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
.tiles span, .stage span, .wire span { color: var(--ink-soft); font-size: 14px; display: block; }
.pipeline { display: flex; align-items: center; gap: 12px; flex-wrap: wrap; }
.stage { flex: 1 1 220px; }
.stage b { font-size: 18px; }
.stage em { color: var(--ink-soft); font-size: 14px; }
.wire { text-align: center; padding: 0 6px; }
.wire i { font-style: normal; font-size: 26px; line-height: 1; color: var(--mixed); }
figure { margin: 0; }
figure svg { width: 100%; height: auto; display: block; }
.caption { color: var(--ink-soft); font-size: 14px; margin-top: 8px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14.5px; }
th { text-align: left; font-weight: 600; color: var(--ink-soft); }
th, td { padding: 6px 20px 6px 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
tfoot td { font-weight: 600; border-bottom: 0; }
.bars td, .bars th { border: 0; }
.bars th { color: var(--ink); font-weight: 500; width: 1%; }
.bars .bar { width: 100%; }
.bar div { height: 18px; border-radius: 4px; }
.bar .mixed { background: var(--mixed); }
.bar .baseline { background: var(--baseline); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 6px 20px; margin: 0;
  font-size: 14.5px; }
dt { color: var(--ink-soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.mono, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  font-size: 12.5px; }
pre { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px; margin: 0;
  padding: 12px 14px; overflow-x: auto; line-height: 1.5; }
"""
