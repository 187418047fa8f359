"use strict";
// The parts of the page, each drawn from what is selected.
const label = (kernel) => { const k = DATA.kernels[kernel]; return `${k.code}  ${k.label}`; };
const cellLink = (index, text) => link(text || DATA.cells[index].name, { cell: DATA.cells[index].name });
const recordLink = (p, text) => link(text || p.id, { cell: p.place.name, record: p.id });
const nameOf = (p) => element("span", { class: "name" }, swatch(p), p.name);

// ---------------------------------------------------------------- regime map
const tight = (text) => text.replace(" %", "%"); // a tile is narrow
const MARGINS = {
  next: (w) => w.margin == null ? "alone" : tight(signed(w.margin, w.margin < 0.1 ? 1 : 0)),
  peer: (w) => w.vs_peer == null ? "no lib" : times(w.vs_peer),
  limit: (w) => tight(percent(share(w.best), 0)),
  dispatch: (w) => w.loss == null ? "–" : tight(signed(w.loss)),
};
async function drawMap() {
  const found = winners(shown());
  const rows = found.map((w) => {
    const c = DATA.cells[w.cell], k = w.best.version_of;
    return { panel: c.panel, rank: c.rank, b: c.b, t: c.t, kernel: label(w.best.kernel), code: k.code, text: MARGINS[SELECTED.margin](w),
      light: k.light, tie: w.tie, tip: c.name, w,
      said: `${c.name}: ${w.best.name}, ${micros(us(w.best))} microseconds` + (w.next ? `, next ${w.next.name} ${signed(w.margin)}` : ", nothing else was measured") };
  });
  const wins = grouped(found, (w) => w.best.kernel);
  const lead = [...wins].sort((a, b) => b[1].length - a[1].length).slice(0, 3)
    .map(([kernel, some]) => `${DATA.kernels[kernel].label} in ${some.length}`).join(", ");
  const lost = found.filter((w) => w.vs_peer != null), ahead = lost.filter((w) => w.vs_peer > 1).length;
  put("map-lead", found.length ? `${found.length} cells measured on ${SELECTED.device}, ${SELECTED.state}. Fastest: ${lead}.`
    + (lost.length ? ` Ours ahead of the fastest library in ${ahead} of ${lost.length}.` : "") : "");
  const contexts = new Set(rows.map((r) => r.t)).size;
  const open = (row) => go({ cell: row.tip });
  await draw("map", "map", { rows: rows.map(({ w, ...row }) => row) }, {
    change: (spec) => { spec.columns = Math.max(1, Math.floor((room("map") + 10) / (contexts * 42 + 75))); },
    open, show: (row) => mapTip(found.find((w) => DATA.cells[w.cell].name === row.tip)),
  });
  put("map-table", table([
    ["cell", (w) => cellLink(w.cell)], ["fastest", (w) => nameOf(w.best)], ["µs", (w) => micros(us(w.best)), "n"],
    ["of limit", (w) => percent(share(w.best)), "n"], ["next", (w) => w.next ? w.next.name : "–"],
    ["ahead by", (w) => w.next ? signed(w.margin) + (w.tie ? " (ranges touch)" : "") : "–", "n"],
    ["fastest library", (w) => w.peer ? w.peer.name : "–"], ["ours against it", (w) => times(w.vs_peer), "n"],
    ["dispatcher's choice", (w) => w.dispatch ? w.dispatch.version_of.label : "–"], ["it loses", (w) => signed(w.loss), "n"],
  ], found, { caption: `${SELECTED.device}, ${SELECTED.state}` }));
}
const mapTip = (w) => [element("strong", {}, DATA.cells[w.cell].name), facts([
  ["fastest", `${w.best.name}, ${micros(us(w.best))} µs`], ["of limit", percent(share(w.best))],
  ["next", w.next ? `${w.next.name}, ${signed(w.margin)}${w.tie ? ", ranges touch" : ""}` : "nothing else was measured"],
  ["library", w.peer ? `${w.peer.name}; ours ${times(w.vs_peer)}` : null],
  ["dispatcher", w.dispatch ? `${w.dispatch.version_of.label}, loses ${signed(w.loss)}` : null],
  ["contenders", w.contenders], ["mixed", w.mixed ? "measured in different runs" : null],
])];

// ---------------------------------------------------------------- one cell
const FAR = 5; // contenders that take this many times the fastest's time are named under the chart
async function drawCell() {
  const c = DATA.cells[SELECTED.cell];
  const here = POINTS.filter((p) => p.newest && p.cell === SELECTED.cell && p.device === SELECTED.device);
  const timed = here.filter((p) => us(p) != null).sort(byTime);
  if (!c || !timed.length) {
    put("cell-lead", "No contender of this cell was timed in this state on this device.");
    for (const id of ["cell-note", "cell-table", "record"]) put(id);
    await draw("cell-chart", "cell", { rows: [] });
    return;
  }
  const best = timed[0], drawn = timed.filter((p) => us(p) <= FAR * us(best)), far = timed.filter((p) => us(p) > FAR * us(best));
  put("cell-lead", element("strong", {}, c.name), `: ${c.text}. Fastest on ${SELECTED.device}, ${SELECTED.state}: `, recordLink(best, best.name),
    `, ${micros(us(best))} µs, ${percent(share(best))} of what the hardware allows.`);
  const rows = drawn.map((p) => ({ name: p.name, kernel: label(p.kernel), us: us(p), p10: stats(p)[1], p90: stats(p)[2],
    limit: limit(p) || null, tip: p.id, said: said(p) }));
  await draw("cell-chart", "cell", { rows }, { open: (row) => go({ record: row.tip }), show: (row) => tip(BY_ID.get(row.tip)) });
  const runs = new Set(timed.map((p) => p.set_name));
  put("cell-note", "Whisker: 10th to 90th percentile. Dashed line: the limit, from the matrix rate and the reading rate of the same run."
    + (far.length ? ` Beyond the picture: ${far.map((p) => `${p.name} ${micros(us(p))} µs`).join(", ")}.` : "")
    + (runs.size > 1 ? ` Measured in ${runs.size} runs (${[...runs].join("; ")}): times of different runs compare only as well as their limits agree.` : ""));
  const resource = (p, name) => p.resources == null ? null : DATA.resources[p.resources][name];
  put("cell-table", table([
    ["contender", (p) => element("span", { class: "name" }, swatch(p), recordLink(p, p.name))],
    ["burst µs", (p) => micros(us(p, "burst")), "n"], ["of limit", (p) => percent(share(p, "burst")), "n"],
    ["sustained µs", (p) => micros(us(p, "sustained")), "n"], ["of limit", (p) => percent(share(p, "sustained")), "n"],
    ["host µs", (p) => number(p.host), "n"], ["error of out", (p) => p.error == null ? "–" : p.error.toExponential(1), "n"],
    ["registers", (p) => resource(p, "registers"), "n"], ["shared KiB", (p) => resource(p, "smem") == null ? null : number(resource(p, "smem") / 1024), "n"],
    ["spills B", (p) => resource(p, "spill_bytes"), "n"], ["blocks/SM", (p) => resource(p, "ctas_per_sm"), "n"],
    ["tiling", (p) => p.tiling || "–"], ["measured", (p) => element("span", { class: "name" }, p.at.slice(0, 10))],
  ], [...here].sort((a, b) => (us(a) ?? Infinity) - (us(b) ?? Infinity)), { caption: "A contender's name opens its record.", mark: (p) => p === best ? "best" : "" }));
  drawRecord();
}
function drawRecord() {
  const p = BY_ID.get(SELECTED.record);
  if (!p || p.cell !== SELECTED.cell) { put("record"); return; }
  const range = (state) => { const s = p[state]; return s ? `${micros(s[0])} µs, ${micros(s[1])} to ${micros(s[2])} in ${s[3]} samples; limit ${micros(limit(p, state))} µs, ${percent(share(p, state))} of it` : null; };
  const r = p.resources == null ? null : DATA.resources[p.resources];
  put("record", element("h3", {}, `Record ${p.id}: ${p.name}`), facts([
    ["burst", range("burst")], ["sustained", range("sustained")], ["bound by", p.bound], ["matrix rate, reading rate", p.rates],
    ["other clock", p.cross == null ? null : `${micros(p.cross)} µs by triton's do_bench_cudagraph`],
    ["error", p.error == null ? null : `out ${p.error.toExponential(2)} (relative Frobenius), lse ${p.lse.toExponential(2)} (largest)`],
    ["tiling", p.tiling], ["asked for", p.asked], ["planning", p.plan == null ? null : `${micros(p.plan)} µs to bind to other tensors`],
    ["resources", r ? r.text : "not recorded"], ["instructions", r ? r.instructions : null], ["how it was timed", p.method == null ? null : DATA.methods[p.method]],
    ["where", DATA.environments[p.environment]], ["clocks", p.clocks], ["source", p.source], ["when", p.at], ["experiment", p.experiment], ["set", p.set_name],
  ]), element("p", {}, "Measure it again:"), element("pre", {}, p.command));
}

// ---------------------------------------------------------------- roofline
async function drawRoofline() {
  const points = shown(), roofs = (DATA.roofs[SELECTED.device] || {})[SELECTED.state] || [];
  const rows = points.map((p) => ({ x: p.flops / p.bytes, y: p.flops / us(p) / 1e6, kernel: label(p.kernel), language: p.language,
    tip: p.id, said: said(p) })).filter((r) => r.x > 0 && r.y > 0);
  const low = Math.min(...rows.map((r) => r.x)) / 1.4, high = Math.max(...rows.map((r) => r.x)) * 1.4;
  const lines = roofs.flatMap((roof) => {
    const knee = roof.tflops * 1e3 / roof.gbps;
    const xs = [low, ...(knee > low && knee < high ? [knee] : []), high];
    return xs.map((x) => ({ x, y: Math.min(roof.tflops, x * roof.gbps / 1e3), kind: roof.kind }));
  });
  put("roofline-lead", rows.length ? `${rows.length} records. Higher is faster; a point on the line is as fast as the hardware allows.` : "");
  const open = (row) => { const p = BY_ID.get(row.tip); go({ cell: p.place.name, record: p.id }); };
  await draw("roofline", "roofline", { rows, roofs: lines }, { open, show: (row) => tip(BY_ID.get(row.tip)) });
  put("roofline-table", roofs.length ? table([
    ["roof", (r) => r.kind], ["TFLOP/s", (r) => number(r.tflops, 0), "n"], ["GB/s", (r) => number(r.gbps, 0), "n"],
    ["FLOP/B at the knee", (r) => number(r.tflops * 1e3 / r.gbps, 0), "n"], ["source", (r) => r.source],
  ], roofs) : element("p", { class: "note" }, "No roof is known for this device."));
}

// ---------------------------------------------------------------- ladder
async function drawLadder() {
  const all = POINTS.filter((p) => p.newest && us(p) != null && p.device === SELECTED.device);
  const { steps, peer, limit: least } = ladderOf(all, SELECTED.design, SELECTED.cell);
  const fastest = Math.min(...steps.map((s) => us(s.point)));
  const near = steps.filter((s) => us(s.point) <= FAR * fastest), far = steps.filter((s) => us(s.point) > FAR * fastest);
  const rows = near.map((s) => ({ version: `v${s.version}`, us: us(s.point), p10: stats(s.point)[1], p90: stats(s.point)[2], language: s.language,
    label: micros(us(s.point)), tip: s.point.id, said: said(s.point) + (s.gain ? `, ${times(s.gain)} the version before` : "") }))
    .sort((a, b) => Number(a.version.slice(1)) - Number(b.version.slice(1)));
  const marks = [...(peer ? [{ us: us(peer), what: "library", label: `best library ${micros(us(peer))}` }] : []),
    ...(least ? [{ us: least, what: "limit", label: `limit ${micros(least)}` }] : [])];
  put("ladder-lead", steps.length ? `${SELECTED.design} on ${DATA.cells[SELECTED.cell].name}, ${SELECTED.device}, ${SELECTED.state}.`
    + (peer ? ` The fastest library there is ${peer.name}, ${micros(us(peer))} µs.` : " No library was timed there.")
    + (far.length ? ` Beyond the picture: ${far.map((s) => `${s.point.name} ${micros(us(s.point))} µs`).join(", ")}.` : "") : "");
  await draw("ladder", "ladder", { rows, marks }, { open: (row) => go({ record: row.tip }), show: (row) => tip(BY_ID.get(row.tip)) });
  const entry = (s) => DATA.entries[s.point.version_of.label];
  const anchor = (s) => "#devlog-" + s.point.version_of.label.replace("/", "-");
  put("ladder-table", table([
    ["version", (s) => recordLink(s.point, s.point.name)], ["µs", (s) => micros(us(s.point)), "n"],
    ["of limit", (s) => percent(share(s.point)), "n"], ["against the version before", (s) => times(s.gain), "n"],
    ["the same over all cells", (s) => s.mean ? `${times(s.mean)} (${s.cells})` : "–", "n"],
    ["against the fastest library", (s) => peer ? times(us(peer) / us(s.point)) : "–", "n"],
    ["verdict", (s) => entry(s) ? element("span", {}, element("a", { href: anchor(s) }, entry(s).verdict), `: ${entry(s).why}`) : "no devlog entry here"],
  ], steps, { caption: "× is time before over time after: above 1 is faster. Over all cells: geometric mean, and how many cells have both." }));
  put("devlogs", ...steps.filter(entry).map((s) => {
    const e = entry(s), holder = element("div", { class: "entry" });
    holder.innerHTML = e.html; // made by the report from the project's own devlogs, with raw HTML escaped
    return element("details", { id: anchor(s).slice(1) }, element("summary", {}, `Devlog of ${s.point.version_of.label} (${e.path})`), holder);
  }));
}

// ---------------------------------------------------------------- languages
async function drawLanguages() {
  const found = pairsOf(shown(), SELECTED.first, SELECTED.second);
  const rows = found.flatMap((pair, rank) => pair.filter((p) => share(p)).map((p) => ({ cell: p.place.name, rank, language: p.language,
    share: 100 * share(p), tip: p.id, said: said(p) })));
  const mean = found.length ? Math.exp(found.map(([a, b]) => Math.log(us(a) / us(b))).reduce((x, y) => x + y, 0) / found.length) : null;
  put("languages-lead", mean ? `The fastest of each language in ${found.length} cells: ${SELECTED.first} takes ${times(mean)} the time of ${SELECTED.second} (geometric mean).`
    : "No cell was measured in both languages.");
  const open = (row) => go({ cell: BY_ID.get(row.tip).place.name, record: row.tip });
  const show = (row) => tip(BY_ID.get(row.tip));
  await draw("languages-chart", "languages", { rows }, { open, show });
  const pair = found.find(([a]) => a.cell === SELECTED.cell) || found[0] || [];
  const mixes = pair.flatMap((p) => {
    const mix = p.resources == null ? null : DATA.resources[p.resources].mix;
    return mix ? DATA.kinds.map((kind, rank) => ({ name: `${p.name}, ${p.place.name}`, kind, rank, count: mix[rank], share: 100 * mix[rank] / mix.reduce((x, y) => x + y, 0),
      tip: `${p.id} ${kind}`, said: `${p.name}: ${mix[rank]} instructions of kind ${kind}` })) : [];
  }).filter((row) => row.count > 0);
  await draw("instructions", "instructions", { rows: mixes }, { show: (row) => [element("strong", {}, row.name), facts([[row.kind, `${row.count} (${number(row.share)} %)`]])] });
  const of = (p, name) => p.resources == null ? null : DATA.resources[p.resources][name];
  const both = (get) => ([a, b]) => { const x = get(a), y = get(b); return `${x ?? "–"} / ${y ?? "–"}`; };
  const lines = (p) => { const s = DATA.sources[p.version_of.label]; return s ? s.own + (p.hash === s.hash ? "" : "*") : null; };
  put("languages-table", table([
    ["cell", ([a]) => cellLink(a.cell)], ["versions", ([a, b]) => element("span", {}, recordLink(a, a.name), " / ", recordLink(b, b.name))],
    ["µs", both((p) => micros(us(p))), "n"], ["time, first / second", ([a, b]) => times(us(a) / us(b)), "n"],
    ["registers", both((p) => of(p, "registers")), "n"], ["shared KiB", both((p) => of(p, "smem") == null ? null : number(of(p, "smem") / 1024, 0)), "n"],
    ["spills B", both((p) => of(p, "spill_bytes")), "n"], ["blocks/SM", both((p) => of(p, "ctas_per_sm")), "n"],
    ["instructions", both((p) => of(p, "total")), "n"], ["lines of code", both(lines), "n"],
  ], found, { caption: `${SELECTED.first} / ${SELECTED.second}. Lines: of the version's file, without blank lines, comments and docstrings; * the files have changed since the record.` }));
}

// ---------------------------------------------------------------- two sets
async function drawCompare() {
  const of = (set) => POINTS.filter((p) => p.set === set);
  const { moves, unlimited, gone, come } = compared(of(SELECTED.before), of(SELECTED.after));
  const moved = moves.filter((m) => m.moved);
  const same = SELECTED.before === SELECTED.after;
  put("compare-lead", same ? `There is one record set to choose from or the same one twice: ${DATA.sets[SELECTED.before] ?? "none"}.`
    : moves.length ? `${moves.length} contenders stand in both sets (${SELECTED.state}); ${moved.length} moved beyond their own spread, each time divided by the limit of its own run.`
      + ` Only before: ${gone}; only after: ${come}.` + (unlimited ? ` Without a limit, and so not compared: ${unlimited}.` : "")
    : `The two sets have no contender and cell in common (${gone} only before, ${come} only after)` + (unlimited ? `, or no limits: ${unlimited}.` : "."));
  const way = (m) => !m.moved ? "within its spread" : m.change < 0 ? "faster" : "slower";
  const rows = same ? [] : moves.slice(0, 40).map((m, rank) => ({ name: `${m.b.name}, ${m.b.place.name}`, rank, change: 100 * m.change, low: 100 * m.low, high: 100 * m.high,
    way: way(m), tip: m.b.id, said: `${m.b.name} on ${m.b.place.name}: ${signed(m.change)}, ${way(m)}` }));
  const show = (row) => { const m = moves.find((x) => x.b.id === row.tip); return [element("strong", {}, row.name), facts([["change", `${signed(m.change)} (${signed(m.low)} to ${signed(m.high)})`],
    ["before", `${micros(us(m.a))} µs, limit ${micros(limit(m.a))} µs`], ["after", `${micros(us(m.b))} µs, limit ${micros(limit(m.b))} µs`]])]; };
  await draw("compare", "moves", { rows }, { open: (row) => go({ cell: BY_ID.get(row.tip).place.name, record: row.tip }), show });
  put("compare-table", same || !moves.length ? null : table([
    ["cell", (m) => cellLink(m.b.cell)], ["contender", (m) => m.b.name], ["before", (m) => recordLink(m.a, `${micros(us(m.a))} µs`), "n"],
    ["of limit", (m) => percent(share(m.a)), "n"], ["after", (m) => recordLink(m.b, `${micros(us(m.b))} µs`), "n"], ["of limit", (m) => percent(share(m.b)), "n"],
    ["change", (m) => signed(m.change), "n"], ["its spread allows", (m) => `${signed(m.low)} to ${signed(m.high)}`, "n"], ["", (m) => way(m)],
  ], moves.slice(0, 400), { caption: "Change of time over limit. Moved: zero is not between what the 10th and 90th percentiles allow." }));
}

// ---------------------------------------------------------------- left out
function drawLeft() {
  put("left", DATA.left_out.length ? table([["how many", (l) => l.count, "n"], ["of what", (l) => l.what], ["why", (l) => l.why],
    ["for example", (l) => l.examples.join("; ") || "–"]], DATA.left_out) : element("p", {}, "Nothing: every record that was read is shown."));
}
