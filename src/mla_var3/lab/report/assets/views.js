"use strict";
// The parts of the page, each drawn from what is selected.
const label = (kernel) => DATA.kernels[kernel].title;
const cellLink = (index, text) => link(text || DATA.cells[index].name, { cell: DATA.cells[index].name });
const recordLink = (p, text) => link(text || p.id, { cell: p.place.name, record: p.id });
const nameOf = (p) => element("span", { class: "name" }, swatch(p), shownName(p));

// ---------------------------------------------------------------- regime map
const STEP = 36, AXIS = 70, SPACING = 14; // pixels: of a tile, of what stands beside a panel, and between panels
const TITLE_LETTER = 7, TITLE_ROOM = 45; // of a title's letter, and what a title may be wider than the tiles
async function drawMap() {
  const found = winners(shown()), tiles = onMap(found);
  const rows = tiles.map((w) => {
    const c = DATA.cells[w.cell];
    return { panel: c.panel, b: c.b, t: c.t, code: w.best.version_of.code, ahead: w.vs_peer == null ? null : Math.log2(w.vs_peer),
      tip: c.name,
      said: `${c.name}: ${shownName(w.best)}, ${micros(us(w.best))} microseconds, ` + (w.vs_peer == null ? "no library was measured" : `ours ${times(w.vs_peer)} the best library`) };
  });
  const against = found.filter((w) => w.vs_peer != null), ahead = against.filter((w) => w.vs_peer > 1);
  const mean = against.length ? Math.exp(against.reduce((sum, w) => sum + Math.log(w.vs_peer), 0) / against.length) : null;
  put("map-lead", found.length ? `${found.length} cells on ${SELECTED.device}, ${SELECTED.state}` + (mean ? `: ours is ahead of the best library in ${ahead.length} of ${against.length}`
    + ` where one was measured, ${times(mean, 4)} as fast in the geometric mean. ` : "; no library was measured in any of them. ") + resting(found) : "");
  const used = [...new Set(tiles.map((w) => w.best.version_of))];
  put("map-codes", used.length ? "Kernels: " : "", ...used.flatMap((k, i) => [i ? ", " : "", element("b", {}, k.code), ` ${k.label}`]));
  const panels = [...grouped(rows, (r) => r.panel)].map(([name, some]) => ({ name, contexts: new Set(some.map((r) => r.t)).size, batches: new Set(some.map((r) => r.b)).size }));
  // A tile is as wide as its code and, where there is room for that, as the number below it; else the numbers stand upright.
  const most = Math.max(1, ...panels.map((p) => p.contexts)), space = Math.floor((room("map") - AXIS) / most);
  const widest = (texts) => Math.ceil(Math.max(...texts.map((text) => text.length)) * LETTER);
  const axis = widest(rows.map((r) => shortened(r.t))) + 5, step = Math.max(widest(rows.map((r) => r.code)), Math.min(space, Math.max(STEP, axis)));
  const open = (row) => go({ cell: row.tip });
  await draw("map", "map", { rows, legend: DATA.map_legend }, {
    change: (spec) => { // as charts.regime_map
      const { layer, view, height } = spec;
      if (axis > step) for (const part of layer) part.encoding.x.axis = { ...part.encoding.x.axis, labelAngle: -90 };
      const panel = ({ name, contexts, batches }) => ({ layer, view, width: contexts * step, height: batches * height.step, title: { text: titleLines(name, contexts * step + TITLE_ROOM), fontSize: 12, offset: 4 }, transform: [{ filter: { field: "panel", equal: name } }] });
      const legend = { ...DATA.specs.map_legend, width: { step: Math.min(50, Math.floor((room("map") - AXIS) / DATA.map_legend.length) - 1) } };
      spec.vconcat = [legend, ...packedRows(panels, room("map"), step).map((row) => ({ hconcat: row.map(panel), spacing: SPACING }))];
      spec.spacing = SPACING;
      for (const name of ["layer", "width", "height", "view"]) delete spec[name];
    },
    open, show: (row) => mapTip(tiles.find((w) => DATA.cells[w.cell].name === row.tip)),
  });
  const picks = (DATA.picks[SELECTED.device] || {})[SELECTED.state] || { said: "", of: {} }, pick = (w) => picks.of[DATA.cells[w.cell].name];
  put("map-all", `All ${found.length} cells as a table, ${found.length - tiles.length} of retired versions, problems drawn at random, other lengths, sizes and designs among them`);
  put("map-picks", `The dispatcher, with the table and the versions of today: ${picks.said}`);
  put("map-table", table([
    ["cell", (w) => cellLink(w.cell)], ["ours", (w) => w.ours ? nameOf(w.ours) : null], ["µs", (w) => w.ours ? micros(us(w.ours)) : null, "n"],
    ["of limit", (w) => w.ours ? percent(share(w.ours)) : null, "n"], ["best library", (w) => w.peer ? nameOf(w.peer) : null],
    ["library / ours", (w) => times(w.vs_peer) + (w.tie ? " (ranges touch)" : ""), "n"], ["our next", (w) => w.next ? shownName(w.next) : null],
    ["behind by", (w) => signed(w.margin), "n"], ["dispatcher's pick", (w) => pick(w) ? pick(w)[0] : null], ["it loses", (w) => pick(w) ? signed(pick(w)[1]) : null, "n"],
  ], found, { caption: `${SELECTED.device}, ${SELECTED.state}` }));
}
const shortened = (n) => n % 1024 ? String(n) : `${n / 1024}k`; // as charts._SHORT
// A panel's title, broken behind commas where a line would be wider than the panel; as charts.title_lines.
function titleLines(name, width) {
  const lines = [];
  for (const part of name.split(", ")) {
    const longer = `${lines.at(-1)}, ${part}`;
    if (lines.length && longer.length * TITLE_LETTER <= width) lines[lines.length - 1] = longer;
    else lines.push(part);
  }
  return lines.map((line, i) => i + 1 < lines.length ? `${line},` : line);
}
// Panels in rows of that width, large ones first.
function packedRows(panels, width, step) {
  const found = [];
  let left = 0;
  for (const panel of [...panels].sort((a, b) => b.contexts - a.contexts)) {
    const wide = panel.contexts * step + AXIS;
    if (!found.length || left < wide) { found.push([]); left = width; }
    found[found.length - 1].push(panel);
    left -= wide + SPACING;
  }
  return found;
}
const mapTip = (w) => [element("strong", {}, DATA.cells[w.cell].name), facts([
  ["ours", w.ours ? `${shownName(w.ours)}, ${micros(us(w.ours))} µs, ${percent(share(w.ours))} of the limit` : "not measured"],
  ["library", w.peer ? `${w.peer.name}, ${micros(us(w.peer))} µs; ours ${times(w.vs_peer)}${w.tie ? ", ranges touch" : ""}` : "none was measured"],
  ["our next", w.next ? `${shownName(w.next)}, ${signed(w.margin)}` : null],
  ["mixed", w.mixed ? "measured in different runs" : null],
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
  const best = winners(timed)[0]?.best ?? timed[0], first = timed[0];
  const some = timed.some((p) => p.version_of.live) ? timed.filter((p) => p.version_of.live) : timed;
  const drawn = some.filter((p) => us(p) <= FAR * us(some[0])), far = some.filter((p) => us(p) > FAR * us(some[0]));
  put("cell-lead", element("strong", {}, c.name), `: ${c.text}. Fastest on ${SELECTED.device}, ${SELECTED.state}: `, recordLink(best, shownName(best)),
    `, ${micros(us(best))} µs, ${percent(share(best))} of what the hardware allows.`,
    us(first) < us(best) && !first.version_of.live ? ` By its own record, ${shownName(first)} took ${micros(us(first))} µs.` : "");
  const rows = drawn.map((p) => ({ name: shownName(p), kernel: label(p.kernel), us: us(p), p10: stats(p)[1], p90: stats(p)[2],
    limit: limit(p) || null, tip: p.id, said: said(p) }));
  await draw("cell-chart", "cell", { rows }, { open: (row) => go({ record: row.tip }), show: (row) => tip(BY_ID.get(row.tip)) });
  const runs = new Set(timed.map((p) => p.set_name));
  put("cell-note", (some.length < timed.length ? `Retired versions, ${timed.length - some.length} here, stand in the table only. ` : "") + "Whisker: 10th to 90th percentile. Dashed line: the limit, from the matrix rate and the reading rate of the same run."
    + (far.length ? ` Beyond the picture: ${far.map((p) => `${shownName(p)} ${micros(us(p))} µs`).join(", ")}.` : "")
    + (runs.size > 1 ? ` Measured in ${runs.size} runs: times of different runs compare only as well as their limits agree.` : ""));
  const resource = (p, name) => p.resources == null ? null : DATA.resources[p.resources][name];
  put("cell-table", table([
    ["contender", (p) => element("span", { class: "name" }, swatch(p), recordLink(p, shownName(p)))],
    ["burst µs", (p) => micros(us(p, "burst")), "n"], ["of limit", (p) => percent(share(p, "burst")), "n"],
    ["sustained µs", (p) => micros(us(p, "sustained")), "n"], ["of limit", (p) => percent(share(p, "sustained")), "n"],
    ["host µs", (p) => number(p.host), "n"], ["error", (p) => p.error == null ? "–" : p.error.toExponential(1), "n"],
    ["regs", (p) => resource(p, "registers"), "n"], ["smem KiB", (p) => resource(p, "smem") == null ? null : number(resource(p, "smem") / 1024), "n"],
    ["spills B", (p) => resource(p, "spill_bytes"), "n"], ["blocks/SM", (p) => resource(p, "ctas_per_sm"), "n"],
    ["code KiB", (p) => resource(p, "code") == null ? null : number(resource(p, "code") / 1024), "n"], ["compile s", (p) => number(p.compile), "n"],
    ["measured", (p) => element("span", { class: "name" }, p.at.slice(0, 10))],
  ], [...here].sort((a, b) => (us(a) ?? Infinity) - (us(b) ?? Infinity)), { caption: "A contender's name opens its record.", mark: (p) => p === best ? "best" : "" }));
  drawRecord();
}
// A bar of parts that stand one behind another, [name, µs] each, and what they are below it.
function stacked(parts) {
  const total = parts.reduce((sum, [, us]) => sum + us, 0);
  const bar = element("div", { class: "stacked", ariaHidden: "true" }, ...parts.map(([name, us]) => {
    const part = element("span", { title: `${name}: ${micros(us)} µs` }, name);
    part.style.flexGrow = us;
    return part;
  }));
  const said = parts.map(([name, us]) => `${name} ${micros(us)} µs (${percent(us / total)})`).join(", ");
  return element("div", {}, bar, said + "; each from the end of the one before to its own, under torch's profiler");
}
function drawRecord() {
  const p = BY_ID.get(SELECTED.record);
  if (!p || p.cell !== SELECTED.cell) { put("record"); return; }
  const range = (state) => { const s = p[state]; return s ? `${micros(s[0])} µs, ${micros(s[1])} to ${micros(s[2])} in ${s[3]} samples; limit ${micros(limit(p, state))} µs, ${percent(share(p, state))} of it` : null; };
  const r = p.resources == null ? null : DATA.resources[p.resources];
  put("record", element("h3", {}, `Record ${p.id}: ${p.name}`), facts([
    ["burst", range("burst")], ["sustained", range("sustained")], ["bound by", p.bound], ["matrix rate, reading rate", p.rates],
    ["other clock", p.cross == null ? null : `${micros(p.cross)} µs by triton's do_bench_cudagraph`],
    ["error", p.error == null ? null : `out ${p.error.toExponential(2)} (relative Frobenius)` + (p.lse == null ? "" : `, lse ${p.lse.toExponential(2)} (largest)`)],
    ["parts by themselves", p.beside], ["kernels of a call", p.timeline == null ? null : stacked(p.timeline)],
    ["tiling", p.tiling], ["asked for", p.asked], ["planning", p.plan == null ? null : `${micros(p.plan)} µs to bind to other tensors`],
    ["resources", r ? r.text : "not recorded"], ["compiling", p.compile == null ? null : `${number(p.compile)} s`], ["instructions", r ? r.instructions : null], ["how it was timed", p.method == null ? null : DATA.methods[p.method]],
    ["where", DATA.environments[p.environment]], ["clocks", p.clocks], ["source", p.source], ["when", p.at], ["experiment", p.experiment], ["set", p.set_name],
  ]), element("p", {}, "Measure it again:"), element("pre", {}, p.command));
}

// ---------------------------------------------------------------- roofline
async function drawRoofline() {
  const live = shown().filter((p) => p.version_of.live && p.language !== "torch"), kernels = [...new Set(live.map((p) => p.version_of.label))].sort();
  if (!kernels.includes(SELECTED.of)) SELECTED.of = "";
  options("of", [["", "the cell chosen above"], ...kernels.map((name) => [name, name])], SELECTED.of);
  const points = live.filter((p) => SELECTED.of ? p.version_of.label === SELECTED.of : p.cell === SELECTED.cell);
  const roofs = (DATA.roofs[SELECTED.device] || {})[SELECTED.state] || [];
  const rows = points.map((p) => ({ x: p.flops / p.bytes, y: p.flops / us(p) / 1e6, kernel: label(p.kernel), language: p.language,
    tip: p.id, said: said(p) })).filter((r) => r.x > 0 && r.y > 0);
  const xs = rows.map((r) => r.x), room = SELECTED.of ? 1.4 : 8, low = Math.min(...xs) / room, high = Math.max(...xs) * room;
  const lines = roofs.flatMap((roof) => {
    const knee = roof.tflops * 1e3 / roof.gbps;
    const xs = [low, ...(knee > low && knee < high ? [knee] : []), high];
    return xs.map((x) => ({ x, y: Math.min(roof.tflops, x * roof.gbps / 1e3), kind: roof.kind }));
  });
  put("roofline-lead", rows.length ? `${SELECTED.of || DATA.cells[SELECTED.cell].name} on ${SELECTED.device}, ${SELECTED.state}. Higher is faster; a point on the line is as fast as the hardware allows.` : "");
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
    ["version", (s) => element("span", { class: "name" }, recordLink(s.point, shownName(s.point)))], ["µs", (s) => micros(us(s.point)), "n"],
    ["of limit", (s) => percent(share(s.point)), "n"], ["× the one before", (s) => times(s.gain, 4), "n"],
    ["over all cells", (s) => s.mean ? `${times(s.mean, 4)} (${s.cells})` : "–", "n"],
    ["× the library", (s) => peer ? times(faster(s.point, peer)) : "–", "n"],
    ["verdict", (s) => entry(s) ? element("a", { href: anchor(s), class: "line" }, entry(s).line) : "no devlog entry here"],
  ], steps, { caption: "× is time before over time after: above 1 is faster. Over all cells: geometric mean, and how many cells have both." }));
  put("devlogs", ...steps.filter(entry).map((s) => {
    const e = entry(s), holder = element("div", { class: "entry", tabIndex: 0, role: "region", ariaLabel: `Devlog of ${s.point.version_of.label}` });
    holder.innerHTML = e.html; // made by the report from the project's own devlogs, with raw HTML escaped
    return element("details", { id: anchor(s).slice(1) }, element("summary", {}, `Devlog of ${s.point.version_of.label} (${e.path})`), holder);
  }));
}

// ---------------------------------------------------------------- languages
async function drawLanguages() {
  const found = pairsOf(shown(), SELECTED.first, SELECTED.second);
  const rows = found.flatMap((pair, rank) => pair.filter((p) => share(p)).map((p) => ({ cell: p.place.name, rank, language: p.language,
    share: 100 * share(p), tip: p.id, said: said(p) })));
  const mean = found.length ? Math.exp(found.map(([a, b]) => Math.log(faster(b, a))).reduce((x, y) => x + y, 0) / found.length) : null;
  put("languages-lead", mean ? `The fastest of each language in ${found.length} cells: ${SELECTED.first} takes ${times(mean, 4)} the time of ${SELECTED.second} (geometric mean).`
    : "No cell was measured in both languages.");
  const open = (row) => go({ cell: BY_ID.get(row.tip).place.name, record: row.tip });
  const show = (row) => tip(BY_ID.get(row.tip));
  await draw("languages-chart", "languages", { rows }, { open, show });
  const pair = found.find(([a]) => a.cell === SELECTED.cell) || found[0] || [];
  const mixes = pair.flatMap((p) => {
    const mix = p.resources == null ? null : DATA.resources[p.resources].mix;
    return mix ? DATA.kinds.map((kind, rank) => ({ name: `${shownName(p)}, ${p.place.name}`, kind, rank, count: mix[rank], share: 100 * mix[rank] / mix.reduce((x, y) => x + y, 0),
      tip: `${p.id} ${kind}`, said: `${p.name}: ${mix[rank]} instructions of kind ${kind}` })) : [];
  }).filter((row) => row.count > 0);
  await draw("instructions", "instructions", { rows: mixes }, { show: (row) => [element("strong", {}, row.name), facts([[row.kind, `${row.count} (${number(row.share)} %)`]])] });
  const of = (p, name) => p.resources == null ? null : DATA.resources[p.resources][name];
  const both = (get) => ([a, b]) => { const x = get(a), y = get(b); return `${x ?? "–"} / ${y ?? "–"}`; };
  const lines = (p) => { const s = DATA.sources[p.version_of.label]; return s ? s.lines + (p.hash === s.hash ? "" : "*") : null; };
  put("languages-table", table([
    ["cell", ([a]) => cellLink(a.cell)], ["versions", ([a, b]) => element("span", {}, recordLink(a, shownName(a)), " / ", recordLink(b, shownName(b)))],
    ["µs", both((p) => micros(us(p))), "n"], ["time, first / second", ([a, b]) => times(faster(b, a)), "n"],
    ["registers", both((p) => of(p, "registers")), "n"], ["shared KiB", both((p) => of(p, "smem") == null ? null : number(of(p, "smem") / 1024, 0)), "n"],
    ["spills B", both((p) => of(p, "spill_bytes")), "n"], ["blocks/SM", both((p) => of(p, "ctas_per_sm")), "n"],
    ["instructions", both((p) => of(p, "total")), "n"], ["lines of code", both(lines), "n"],
  ], found, { caption: `${SELECTED.first} / ${SELECTED.second}. Lines: of the version and all that it imports in its language, without blank lines, comments and docstrings; * the files have changed since the record.` }));
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
    ["change", (m) => signed(m.change), "n"], ["its spread allows", (m) => `${signed(m.low)} to ${signed(m.high)}`, "n"], ["moved", (m) => way(m)],
  ], moves.slice(0, 400), { caption: "Change of time over limit. Moved: zero is not between what the 10th and 90th percentiles allow." }));
}

// ---------------------------------------------------------------- left out
// The picture of a trace is an SVG file that Python has looked through; as a part of the page it has the page's colours.
function drawInside() {
  const traces = DATA.traces;
  $("trace").closest("label").hidden = !traces.length;
  if (!traces.length) {
    put("inside-said", element("p", {}, "No trace was found: ", element("code", {}, "mla-var3 profile cute-dsl/flash_mla_v23 --mode trace"),
      " makes one on a GPU, and the next report shows it."));
    return;
  }
  const one = traces[SELECTED.trace];
  put("inside-said", element("ul", {}, ...one.said.map((text) => element("li", {}, text))));
  put("inside", document.importNode(new DOMParser().parseFromString(one.picture, "image/svg+xml").documentElement, true));
  put("inside-table", table([["warpgroup", (s) => `${s.warpgroup} (${s.role})`], ["function or wait", (s) => s.name],
    ["% of its time", (s) => number(s.percent), "n"], ["times a warp", (s) => number(s.count, 0), "n"], ["µs each", (s) => number(s.mean_us, 2), "n"]],
    one.shares.filter((s) => s.percent >= 0.5)));
}
function drawLeft() {
  put("left", DATA.left_out.length ? table([["how many", (l) => l.count, "n"], ["of what", (l) => l.what], ["why", (l) => l.why],
    ["for example", (l) => l.examples.join("; ") || "–"]], DATA.left_out) : element("p", {}, "Nothing: every record that was read is shown."));
}
