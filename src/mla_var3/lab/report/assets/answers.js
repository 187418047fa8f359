"use strict";
// The same answers as report/answers.py and catalogue/spoken.py, over what passes the filters. A test compares them.
const isPeer = (p) => p.language === "peer";
const runsOf = (points) => new Set(points.filter(isPeer).map((p) => p.run)); // in which a library took turns
function versionsOf(points, runs) { // versions that count as ours, fastest first: the retired only where no other was timed
  const own = points.filter((p) => !isPeer(p) && !p.fixed), live = own.filter((p) => p.version_of.live);
  return bySpeed(live.length ? live : own, runs);
}
const libraryOf = (points, ours) => bySpeed(points.filter(isPeer), new Set(ours ? [ours.run] : []))[0] || null;
function winners(points) {
  const found = [];
  for (const [cell, block] of grouped(points.filter((p) => !p.fixed), (p) => p.cell)) {
    const versions = versionsOf(block, runsOf(block)), ours = versions[0] || null, next = versions.find((p) => p.version_of.label !== ours.version_of.label) || null;
    const peer = libraryOf(block, ours), both = ours && peer, vs_peer = both ? faster(ours, peer) : null;
    found.push({
      cell, ours, next, margin: next ? faster(ours, next) - 1 : null, peer, best: both ? (vs_peer >= 1 ? ours : peer) : ours || peer,
      vs_peer, tie: Boolean(both && overlap(ours, peer)), mixed: Boolean(both && ours.run !== peer.run), drawn: block.every((p) => DATA.drawn.includes(p.experiment)), contenders: block.length,
    });
  }
  return found.sort((a, b) => DATA.cells[a.cell].rank - DATA.cells[b.cell].rank);
}
function resting(found) { // on what the cells rest, in a sentence
  const here = found.filter((w) => w.ours && w.ours.version_of.live), today = here.filter((w) => w.ours.today).length;
  return `${here.length} of ${found.length} cells rest on versions that are in this checkout, ${today} of them on the code that these have today; the others' times are of retired versions.`;
}

const PANEL = 4; // as in report/rows.py
function onMap(found) {
  const chosen = found.filter((w) => (!w.ours || w.ours.version_of.live) && !w.drawn);
  const sizes = new Map([...grouped(chosen, (w) => DATA.cells[w.cell].panel)].map(([panel, some]) => [panel, some.length]));
  const least = Math.min(PANEL, Math.max(0, ...sizes.values()));
  return chosen.filter((w) => sizes.get(DATA.cells[w.cell].panel) >= least);
}

function ladderOf(points, design, cell) {
  const mine = points.filter((p) => p.design === design && p.language !== "peer" && !p.fixed), steps = [];
  for (const [language, some] of [...grouped(mine, (p) => p.language)].sort()) {
    const best = new Map();
    for (const [k, group] of grouped(some, (p) => `${p.version} ${p.cell}`)) best.set(k, bySpeed(group, new Set())[0]);
    const versions = [...new Set(some.map((p) => p.version))].sort((a, b) => a - b);
    versions.forEach((version, i) => {
      const point = best.get(`${version} ${cell}`);
      if (!point) return;
      const earlier = i ? best.get(`${versions[i - 1]} ${cell}`) : null;
      const logs = !i ? [] : [...new Set(some.map((p) => p.cell))].flatMap((c) => {
        const a = best.get(`${versions[i - 1]} ${c}`), b = best.get(`${version} ${c}`);
        return a && b ? [Math.log(faster(b, a))] : [];
      });
      steps.push({ language, version, point, gain: earlier ? faster(point, earlier) : null, cells: logs.length,
        mean: logs.length ? Math.exp(logs.reduce((x, y) => x + y, 0) / logs.length) : null });
    });
  }
  const block = points.filter((p) => p.cell === cell), peer = libraryOf(block, versionsOf(block, runsOf(block))[0]);
  const limited = steps.map((s) => limit(s.point)).filter((x) => x);
  return { steps, peer, limit: limited.length ? limited[0] : null };
}

function pairsOf(points, first, second) {
  const found = [], runs = new Map([...grouped(points, (p) => p.cell)].map(([cell, block]) => [cell, runsOf(block)]));
  for (const block of grouped(points.filter((p) => !p.fixed && !isPeer(p)), (p) => `${p.cell} ${p.design}`).values()) {
    const [one, two] = [first, second].map((name) => versionsOf(block.filter((p) => p.language === name), runs.get(block[0].cell) || new Set())[0]);
    if (one && two) found.push([one, two]);
  }
  return found.sort((a, b) => a[0].place.rank - b[0].place.rank);
}

// before, after: lists of points, oldest first; the newest of each contender and cell counts.
function compared(before, after) {
  const key = (p) => `${p.cell} ${p.name}`, moves = [];
  const of = (points) => new Map(points.filter((p) => us(p) != null).map((p) => [key(p), p]));
  const one = of(before), two = of(after);
  let unlimited = 0;
  for (const [k, a] of one) {
    const b = two.get(k);
    if (!b) continue;
    if (!limit(a) || !limit(b)) { unlimited += 1; continue; }
    const x = stats(a).map((v) => v / limit(a)), y = stats(b).map((v) => v / limit(b));
    const change = y[0] / x[0] - 1, low = y[1] / x[2] - 1, high = y[2] / x[1] - 1;
    moves.push({ a, b, change, low, high, moved: low > 0 || high < 0 });
  }
  moves.sort((m, n) => n.moved - m.moved || Math.abs(n.change) - Math.abs(m.change));
  return { moves, unlimited, gone: [...one.keys()].filter((k) => !two.has(k)).length, come: [...two.keys()].filter((k) => !one.has(k)).length };
}
