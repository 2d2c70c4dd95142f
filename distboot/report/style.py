"""How the page looks: in light and dark, on a telephone and on paper."""

from __future__ import annotations

# Colours that stay apart for those who do not see red and green alike (Okabe and Ito, 2008), on white and on black.
CSS = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2024; --quiet: #5c6570; --line: #d6dbe1; --soft: #f3f5f7;
  --ended: #9ad6c2; --first: #c4320a; --later: #f0b429; --lost: #b0568f; --stopped: #c9ced6; --joined: #a9d4f2;
  --unready: #5aa5dc; --start: #8fa3b8; --join: #56b4e9; --wait: #e3e8ed; --command: #009e73; --import: #e69f00;
  --script: #c7a6c9; --group: #0072b2; --on: #16191d; }
@media screen and (prefers-color-scheme: dark) { :root {
  --back: #14171a; --text: #e6e9ec; --quiet: #9aa4af; --line: #363d45; --soft: #1e2327; --ended: #1d7a5f;
  --first: #e2531f; --later: #b98208; --lost: #b0568f; --stopped: #4a525c;
  --joined: #2b6d9c; --unready: #56b4e9; --start: #5f7388; --wait: #2a3138; --on: #fff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
  -webkit-text-size-adjust: 100%; }
main { max-width: 1200px; margin: 0 auto; padding: 20px; }
h1 { font-size: 22px; line-height: 1.3; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 28px 0 8px; border-top: 1px solid var(--line); padding-top: 14px; }
p { margin: 0 0 8px; overflow-wrap: anywhere; }
.quiet { color: var(--quiet); font-size: 13px; }
.badge { display: inline-block; padding: 0 9px; border-radius: 9px; margin-bottom: 8px; font-weight: 600;
  font-size: 13px; background: var(--stopped); color: var(--on); }
.badge.failed { background: var(--first); color: #fff; }
.badge.ended { background: var(--ended); }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: 10px 12px; margin: 0 0 8px;
  font: 12.5px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
ul { margin: 0 0 8px; padding-left: 20px; overflow-wrap: anywhere; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0; font-size: 13px;
  margin-bottom: 10px; }
.map { display: flex; flex-wrap: wrap; gap: 8px; }
.map > .cells { max-width: none; }
.node { border: 1px solid var(--line); border-radius: 6px; padding: 5px 7px 7px; min-width: 0; max-width: 100%; }
.node h3 { font-size: 12px; font-weight: 500; margin: 0 0 3px; color: var(--quiet); max-width: 170px;
  overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.cells { display: flex; flex-wrap: wrap; gap: 3px; max-width: 360px; }
.cell { display: inline-flex; justify-content: center; align-items: center; gap: 3px; font-style: normal;
  border: 1px solid transparent; border-radius: 4px; color: var(--on); min-width: 20px; height: 20px;
  font-size: 11px; line-height: 1; }
.cell b { font-weight: 600; }
.large .cell { min-width: 40px; height: 30px; font-size: 14px; }
.medium .cell { min-width: 31px; gap: 2px; font-size: 10.5px; } .medium .cells { gap: 2px; }
.small .cell { min-width: 13px; width: 13px; height: 15px; font-size: 9px; border-radius: 2px; }
.small { gap: 5px; } .small .cells { gap: 1px; } .small .node { padding: 2px 4px 4px; }
.small .node h3 { font-size: 10px; margin: 0; max-width: 110px; }
.ended { background: var(--ended); } .stopped { background: var(--stopped); } .joined { background: var(--joined); }
.cell.first { background: var(--first); color: #fff; border: 2px solid var(--text); }
.later { background: var(--later); } .lost { background: var(--lost); color: #fff; }
.cell.missing { background: none; border: 2px dashed var(--first); color: var(--text); }
.unready { background: repeating-linear-gradient(45deg, var(--unready) 0 4px, var(--joined) 4px 8px); }
.unknown { border-color: var(--quiet); color: var(--text); }
.phases i { display: inline-block; width: 14px; height: 12px; border-radius: 2px; vertical-align: -1px; }
i.start { background: var(--start); } i.join { background: var(--join); } i.command { background: var(--command); }
i.import { background: var(--import); } i.script { background: var(--script); } i.group { background: var(--group); }
i.wait, i.meet, i.ready { background: repeating-linear-gradient(45deg, var(--wait) 0 4px, var(--line) 4px 6px); }
.timeline { --side: 130px; --end: 58px; font-size: 12px; padding-top: 18px; position: relative; }
.axis { position: absolute; inset: 0 var(--end) 0 var(--side); }
.axis span { position: absolute; top: 0; bottom: 0; border-left: 1px solid var(--line); padding-left: 3px;
  color: var(--quiet); line-height: 16px; white-space: nowrap; }
.rows { position: relative; }
.row { position: relative; height: var(--row); }
.label { position: absolute; left: 0; width: calc(var(--side) - 8px); overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; text-align: right; line-height: max(var(--row), 12px); }
.track { position: absolute; inset: 1px var(--end) 1px var(--side); }
.track i { position: absolute; top: 0; bottom: 0; min-width: 1px; overflow: hidden; font-style: normal;
  font-size: 10px; line-height: calc(var(--row) - 2px); color: #16191d; text-indent: 3px; white-space: nowrap; }
.track i.group, .track i.command { color: #fff; }
.track i.wait, .track i.meet, .track i.ready { color: var(--text); }
.last { position: absolute; right: 0; color: var(--quiet); line-height: var(--row); }
.track .last { right: auto; left: 4px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin-bottom: 8px; }
th, td { text-align: left; vertical-align: top; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } td.number, th.number { text-align: right; white-space: nowrap; }
summary { cursor: pointer; margin: 20px 0 8px; font-weight: 600; }
@media (max-width: 600px) { main { padding: 12px; } h1 { font-size: 18px; }
  .timeline { --side: 62px; --end: 48px; } }
@media print { * { -webkit-print-color-adjust: exact; print-color-adjust: exact; } main { max-width: none; padding: 0; }
  .node, .row, tr { break-inside: avoid; } h2 { break-after: avoid; } }
"""
