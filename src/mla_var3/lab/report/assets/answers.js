"use strict";
// The same answers as report/answers.py, over what passes the filters. A test compares the two.
function winners(points) {
  const found = [];
  for (const [cell, block] of grouped(points.filter((p) => !p.fixed), (p) => p.cell)) {
    const timed = [...block].sort(byTime), all = timed.filter((p) => p.language !== "peer"), live = all.filter((p) => p.version_of.live);
    const versions = live.length ? live : all, ours = versions[0] || null, next = versions.find((p) => p.kernel !== ours.kernel) || null;
    const peer = timed.filter((p) => p.language === "peer").sort(byStep)[0] || null, both = ours && peer;
    found.push({
      cell, ours, next, margin: next ? us(next) / us(ours) - 1 : null, peer, best: both ? (step(ours) <= step(peer) ? ours : peer) : ours || peer,
      vs_peer: both ? step(peer) / step(ours) : null, tie: Boolean(both && overlap(ours, peer)), mixed: Boolean(both && ours.set !== peer.set),
      contenders: timed.length,
    });
  }
  return found.sort((a, b) => DATA.cells[a.cell].rank - DATA.cells[b.cell].rank);
}

const PANEL = 4; // as in report/rows.py
function onMap(found) {
  const sizes = new Map([...grouped(found, (w) => DATA.cells[w.cell].panel)].map(([panel, some]) => [panel, some.length]));
  const least = Math.min(PANEL, Math.max(0, ...sizes.values()));
  return found.filter((w) => sizes.get(DATA.cells[w.cell].panel) >= least);
}

function ladderOf(points, design, cell) {
  const mine = points.filter((p) => p.design === design && p.language !== "peer" && !p.fixed), steps = [];
  for (const [language, some] of [...grouped(mine, (p) => p.language)].sort()) {
    const best = new Map();
    for (const p of some) { const k = `${p.version} ${p.cell}`; if (!best.has(k) || us(p) < us(best.get(k))) best.set(k, p); }
    const versions = [...new Set(some.map((p) => p.version))].sort((a, b) => a - b);
    versions.forEach((version, i) => {
      const point = best.get(`${version} ${cell}`);
      if (!point) return;
      const earlier = i ? best.get(`${versions[i - 1]} ${cell}`) : null;
      const logs = !i ? [] : [...new Set(some.map((p) => p.cell))].flatMap((c) => {
        const a = best.get(`${versions[i - 1]} ${c}`), b = best.get(`${version} ${c}`);
        return a && b ? [Math.log(us(a) / us(b))] : [];
      });
      steps.push({ language, version, point, gain: earlier ? us(earlier) / us(point) : null, cells: logs.length,
        mean: logs.length ? Math.exp(logs.reduce((x, y) => x + y, 0) / logs.length) : null });
    });
  }
  const peer = points.filter((p) => p.cell === cell && p.language === "peer").sort(byTime)[0] || null;
  const limited = steps.map((s) => limit(s.point)).filter((x) => x);
  return { steps, peer, limit: limited.length ? limited[0] : null };
}

function pairsOf(points, first, second) {
  const found = [];
  for (const block of grouped(points.filter((p) => !p.fixed), (p) => `${p.cell} ${p.design}`).values()) {
    const sorted = [...block].sort((a, b) => b.version_of.live - a.version_of.live || byTime(a, b)), one = sorted.find((p) => p.language === first), two = sorted.find((p) => p.language === second);
    if (one && two) found.push([one, two]);
  }
  return found.sort((a, b) => a[0].place.rank - b[0].place.rank);
}

// before, after: lists of points, oldest first; the newest of each contender and cell counts.
function compared(before, after) {
  const key = (p) => `${p.cell} ${p.dispatched ? "dispatch" : p.name}`, moves = [];
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
