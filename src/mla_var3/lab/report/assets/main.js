"use strict";
// Controls, and which part is drawn when: a part is drawn when it comes into view, and again when what it shows changes.
const PARTS = { "part-find": async () => drawAnswer(), "part-map": drawMap, "part-cell": drawCell, "part-roofline": drawRoofline, "part-inside": async () => drawInside(), "part-ladder": drawLadder,
  "part-languages": drawLanguages, "part-compare": drawCompare, "part-left": async () => drawLeft() };
const stale = new Set(Object.keys(PARTS)), inView = new Set();
const FIRST = "first part drawn";
let drawn = Promise.resolve();

function drawPart(id) {
  stale.delete(id);
  const work = PARTS[id]().catch((error) => { $(id).append(element("p", { class: "note" }, `This part could not be drawn: ${error.message}`)); console.error(error); });
  drawn = Promise.all([drawn, work]);
  if (!performance.getEntriesByName(FIRST).length) work.then(() => performance.mark(FIRST));
  return work;
}
function drawAll(ids = Object.keys(PARTS)) {
  settle();
  for (const id of ids) stale.add(id);
  for (const id of [...inView]) if (stale.has(id)) drawPart(id);
}
const observer = new IntersectionObserver((entries) => {
  for (const e of entries) {
    if (!e.isIntersecting) { inView.delete(e.target.id); continue; }
    inView.add(e.target.id);
    if (stale.has(e.target.id)) drawPart(e.target.id);
  }
}, { rootMargin: "300px" });

// Puts what is selected into the controls, and what has no meaning any more right.
function settle() {
  if (SELECTED.cell < 0 || !POINTS.some((p) => p.newest && p.cell === SELECTED.cell && p.device === SELECTED.device)) {
    const first = winners(POINTS.filter((p) => p.newest && us(p) != null && p.device === SELECTED.device));
    const preferred = first.filter((w) => DATA.cells[w.cell].phase === "decode").sort((a, b) => b.contenders - a.contenders);
    const typed = preferred.find(({ cell }) => DATA.cells[cell].plain && NAMES.every((n) => DATA.cells[cell][n] === asked()[n]));
    SELECTED.cell = typed ? typed.cell : preferred.length ? preferred[0].cell : first.length ? first[0].cell : -1;
  }
  if (!DATA.designs.includes(SELECTED.design)) SELECTED.design = DATA.designs[0] || "";
  const cells = [...new Set(POINTS.filter((p) => p.newest && p.device === SELECTED.device).map((p) => p.cell))]
    .sort((a, b) => DATA.cells[a].rank - DATA.cells[b].rank);
  options("cell", cells.map((i) => [i, DATA.cells[i].name]), SELECTED.cell);
  for (const name of ["device", "state", "phase", "geometry", "dtype", "design", "first", "second", "before", "after"]) $(name).value = SELECTED[name];
}
function ask(c) { // the finder's shape, where it can be typed there
  if (!c || !c.plain) return;
  for (const name of NAMES) $(`find-${name}`).value = c[name];
  $("find-causal").checked = c.causal;
}
function options(id, pairs, value) { put(id, ...pairs.map(([v, text]) => element("option", { value: String(v) }, text))); $(id).value = String(value); }
function boxes(id, names, chosen) {
  put(id, ...names.map((name) => element("label", {}, element("input", { type: "checkbox", checked: true, value: name, onchange: (event) => {
    event.target.checked ? chosen.add(name) : chosen.delete(name);
    drawAll();
  } }), ` ${name}`)));
}
function choose(id, pairs, parts) {
  options(id, pairs, SELECTED[id]);
  $(id).addEventListener("change", (event) => {
    const value = event.target.value;
    SELECTED[id] = typeof SELECTED[id] === "number" ? Number(value) : value;
    drawAll(parts);
  });
}
const all = (values) => [["", "all"], ...values.map((v) => [v, v])];

function start() {
  const some = (get) => [...new Set(DATA.cells.map(get))].sort();
  const last = DATA.sets.length - 1;
  SELECTED.after = Math.max(0, last);
  SELECTED.before = Math.max(0, last - 1);
  if (DATA.compare) [SELECTED.before, SELECTED.after] = DATA.compare;
  const languages = DATA.languages.filter((l) => l !== "peer");
  SELECTED.first = languages.includes("cutile-dsl") ? "cutile-dsl" : languages[0] || "";
  SELECTED.second = languages.includes("cute-dsl") ? "cute-dsl" : languages[languages.length - 1] || "";
  SELECTED.state = DATA.state;
  if (DATA.cells.length && DATA.cells.every((c) => c.phase === "prefill")) SELECTED.phase = "";
  if (DATA.cell) SELECTED.cell = CELL_INDEX.get(DATA.cell);
  choose("device", DATA.devices.map((d) => [d.key, d.key]));
  choose("state", [["burst", "burst, cool chip"], ["sustained", "sustained, hot chip"]]);
  choose("phase", [["decode", "decode"], ["prefill", "prefill"], ["", "all"]]);
  choose("geometry", all(some((c) => c.geometry)));
  choose("dtype", all(some((c) => c.dtype)));
  boxes("languages", DATA.languages, SELECTED.languages);
  boxes("designs", [...new Set(POINTS.map((p) => p.design))].sort(), SELECTED.designs);
  choose("design", DATA.designs.map((d) => [d, d]), ["part-ladder"]);
  for (const id of ["first", "second"]) choose(id, languages.map((l) => [l, l]), ["part-languages"]);
  for (const id of ["before", "after"]) choose(id, DATA.sets.map((name, i) => [i, name]), ["part-compare"]);
  choose("trace", DATA.traces.map((one, i) => [i, one.title]), ["part-inside"]);
  $("of").addEventListener("change", (event) => { SELECTED.of = event.target.value; drawAll(["part-roofline"]); });
  $("cell").addEventListener("change", (event) => go({ cell: DATA.cells[Number(event.target.value)].name }));
  options("find-model", [["", "any"], ...FINDER.models.map(([name, h]) => [name, `${name}: ${h} heads`])], "");
  $("find-model").addEventListener("change", (event) => { const found = FINDER.models.find(([name]) => name === event.target.value); if (found) $("find-h").value = found[1]; find(); });
  for (const name of [...NAMES, "causal"]) $(`find-${name}`).addEventListener("input", find);
  for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
  $("theme").addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme.includes("dark");
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    remember(document.documentElement.dataset.theme);
  });
  if (remember()) document.documentElement.dataset.theme = remember();
  put("about", DATA.about);
  put("made", DATA.made);
  addEventListener("hashchange", () => { // an address like #part-map names a part of the page, and selects nothing
    const target = document.getElementById(location.hash.slice(1));
    if (target && target.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); }
    else if (location.hash.includes("=")) {
      const cell = SELECTED.cell, inCell = inView.has("part-cell");
      readHash();
      if (SELECTED.cell !== cell) ask(DATA.cells[SELECTED.cell]);
      drawAll(["part-find", "part-map", "part-cell", "part-ladder", "part-languages", "part-roofline"]);
      if (stale.has("part-cell")) drawPart("part-cell");
      // A link to a record or a cell from elsewhere on the page leads there; inside the part itself nothing jumps.
      if (SELECTED.record) report.settled().then(() => $("record").scrollIntoView({ block: "nearest" }));
      else if (SELECTED.cell !== cell && !inCell) report.settled().then(() => $("part-cell").scrollIntoView());
    }
  });
  let width = innerWidth;
  addEventListener("resize", () => { if (Math.abs(innerWidth - width) > 40) { width = innerWidth; drawAll(); } });
  addEventListener("beforeprint", () => { for (const id of [...stale]) drawPart(id); });
  const asked = readHash();
  settle();
  ask(DATA.cells[SELECTED.cell]);
  for (const id of Object.keys(PARTS)) observer.observe($(id));
  if (asked && location.hash.includes("cell=")) requestAnimationFrame(() => $("part-cell").scrollIntoView());
}

// The theme that was chosen, kept for the next visit where the browser keeps anything for this page.
function remember(theme) {
  try {
    if (theme) localStorage.setItem("mla-var3-theme", theme);
    return localStorage.getItem("mla-var3-theme");
  } catch { return null; }
}

// Answers what is typed, and shows the contenders of that cell below where it was measured.
function find() {
  const found = drawAnswer();
  if (!found || found.cell < 0 || !found.here.length || found.cell === SELECTED.cell) return;
  SELECTED.cell = found.cell;
  SELECTED.record = "";
  drawAll(["part-cell", "part-roofline", "part-ladder", "part-languages"]);
}

// For scripts: everything drawn, and the answers behind the pictures.
const report = window.report = {
  ready: async () => { for (const id of [...stale]) drawPart(id); let seen; do { seen = drawn; await seen; } while (seen !== drawn); },
  settled: async () => { let seen; do { seen = drawn; await seen; } while (seen !== drawn); },
  winners: () => winners(shown()).map((w) => ({ cell: DATA.cells[w.cell].name, best: w.best.version_of.label, margin: w.margin, tie: w.tie, vs_peer: w.vs_peer, mixed: w.mixed })),
  map: () => onMap(winners(shown())).map((w) => DATA.cells[w.cell].name),
  moves: () => compared(POINTS.filter((p) => p.set === SELECTED.before), POINTS.filter((p) => p.set === SELECTED.after)).moves
    .map((m) => ({ cell: m.b.place.name, name: m.b.name, change: m.change, low: m.low, high: m.high, moved: m.moved })),
  ladder: () => ladderOf(POINTS.filter((p) => p.newest && us(p) != null && p.device === SELECTED.device), SELECTED.design, SELECTED.cell).steps
    .map((s) => ({ name: s.point.name, gain: s.gain, mean: s.mean, cells: s.cells })),
  selected: SELECTED,
};
start();
