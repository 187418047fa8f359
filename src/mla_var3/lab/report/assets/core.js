"use strict";
// What all parts share: the records, what is selected, filters, and small builders of page elements.
// This file and those behind it are one async function, which waits for the data: JSON, gzipped, in base64.
const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
const DATA = JSON.parse(await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
const $ = (id) => document.getElementById(id);

const POINTS = DATA.rows.map((row, index) => {
  const p = Object.fromEntries(DATA.cols.map((name, i) => [name, row[i]]));
  p.index = index;
  p.place = DATA.cells[p.cell];
  p.version_of = DATA.kernels[p.kernel];
  p.set_name = DATA.sets[p.set];
  return p;
});
const BY_ID = new Map(POINTS.map((p) => [p.id, p]));
const CELL_INDEX = new Map(DATA.cells.map((cell, index) => [cell.name, index]));

const SELECTED = {
  device: DATA.devices.length ? DATA.devices[0].key : "", state: "burst", phase: "decode", geometry: "", dtype: "",
  languages: new Set(DATA.languages), designs: new Set(POINTS.map((p) => p.design)), cell: -1, design: "", record: "",
  of: "", first: "", second: "", before: 0, after: 0, trace: 0,
};

// ---------------------------------------------------------------- figures
const number = (value, digits = 1) => value == null || !Number.isFinite(value) ? "–"
  : value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const micros = (value) => number(value, value == null || value < 1000 ? 1 : 0);
const percent = (value, digits = 1) => value == null ? "–" : `${number(100 * value, digits)} %`;
const signed = (value, digits = 1) => value == null ? "–" : `${value >= 0 ? "+" : "−"}${number(Math.abs(100 * value), digits)} %`;
// As record.as_ratio: significant digits, and more where a ratio under 1 would else read as 1.
function ratio(value, digits = 3) {
  if (value == null || !(value > 0) || !Number.isFinite(value)) return "–";
  if (Math.abs(value - 1) < 1e-6) value = 1;
  let decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(value)));
  while (value < 1 && Number(value.toFixed(decimals)) >= 1) decimals += 1;
  return value.toFixed(decimals);
}
const times = (value, digits) => value == null ? "–" : `${ratio(value, digits)}×`;
const short = (value) => value % 1024 === 0 ? `${value / 1024}k` : String(value);

// A point's figures in the selected state; null where that state was not measured.
const stats = (p, state = SELECTED.state) => p[state];
const us = (p, state) => { const s = stats(p, state); return s ? s[0] : null; };
const limit = (p, state = SELECTED.state) => p[`${state}_limit`];
const share = (p, state) => { const t = us(p, state), l = limit(p, state); return t && l ? l / t : null; };
const byTime = (a, b) => us(a) - us(b) || (a.name < b.name ? -1 : 1);
// As in a step: with a share of what the calls of a step make once. By this, libraries and versions are compared.
const step = (p) => (p.step && p.step[SELECTED.state]) ?? us(p);
// As Record.limit_speedup: how many times as fast a is as b, each by the limit of its own run.
const ownLimits = (a, b) => a.run !== b.run && limit(a) && limit(b);
const faster = (a, b) => step(b) / step(a) * (ownLimits(a, b) ? limit(a) / limit(b) : 1);
// As catalogue/spoken.py: fastest first, by the share of the limit of its own run that each took.
// Of other runs than `runs`, and of versions that have changed since, only what is ahead by more than runs differ.
function bySpeed(points, runs) {
  const limited = points.every((p) => limit(p));
  const beside = (p) => runs.has(p.run) && (p.today || p.language === "peer");
  const took = (p) => (limited ? step(p) / limit(p) : step(p)) * (beside(p) ? 1 : DATA.runs_differ);
  return [...points].sort((a, b) => took(a) - took(b) || (a.name < b.name ? -1 : 1));
}
function overlap(a, b) {
  const x = stats(a), y = stats(b), [l, m] = ownLimits(a, b) ? [limit(a), limit(b)] : [1, 1];
  return x[1] / l <= y[2] / m && y[1] / m <= x[2] / l;
}

// ---------------------------------------------------------------- filters
function passes(p) {
  const c = p.place;
  return p.device === SELECTED.device && SELECTED.languages.has(p.language) && SELECTED.designs.has(p.design)
    && (!SELECTED.geometry || c.geometry === SELECTED.geometry) && (!SELECTED.dtype || c.dtype === SELECTED.dtype)
    && (!SELECTED.phase || c.phase === SELECTED.phase);
}
const shown = () => POINTS.filter((p) => p.newest && us(p) != null && passes(p));
function grouped(points, key) {
  const groups = new Map();
  for (const p of points) { const k = key(p); if (!groups.has(k)) groups.set(k, []); groups.get(k).push(p); }
  return groups;
}

// ---------------------------------------------------------------- elements
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value; else if (name in made) made[name] = value; else made.setAttribute(name, value);
  }
  made.append(...children.filter((c) => c != null));
  return made;
}
const put = (id, ...children) => { const e = $(id); e.replaceChildren(...children.filter((c) => c != null)); return e; };
const link = (text, changes) => element("a", { href: hashOf(changes) }, text);
const swatch = (p) => { const s = element("span", { class: "swatch", ariaHidden: "true" }); s.style.background = p.version_of.colour; return s; };

const shownName = (p) => p.name + (p.version_of.live ? "" : " (retired)");

// columns: [title, cell of a row, "n" for numbers]; the first names the row. options: caption, class of a row.
// Roles are said, because on a narrow screen rows are blocks, each figure behind its column's name.
function table(columns, rows, options = {}) {
  const head = element("tr", { role: "row" }, ...columns.map(([title, , kind]) => element("th", { scope: "col", role: "columnheader", class: kind || "" }, title)));
  const body = rows.map((row) => element("tr", { role: "row", class: options.mark ? options.mark(row) : "" },
    ...columns.map(([title, cell, kind], i) => {
      const v = cell(row), made = i ? element("td", { role: "cell", class: kind || "" }) : element("th", { scope: "row", role: "rowheader", class: kind || "" });
      if (i) made.dataset.name = title;
      made.append(v == null ? "–" : v);
      return made;
    })));
  return element("table", { role: "table" }, options.caption ? element("caption", {}, options.caption) : null,
    element("thead", { role: "rowgroup" }, head), element("tbody", { role: "rowgroup" }, ...body));
}
const facts = (pairs) => element("dl", {}, ...pairs.filter(([, v]) => v != null && v !== "" && v !== "–")
  .flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));

// ---------------------------------------------------------------- address: #cell=...&record=...
const IN_HASH = ["device", "state", "cell", "record", "design"];
function hashOf(changes) {
  const now = { device: SELECTED.device, state: SELECTED.state, cell: SELECTED.cell < 0 ? "" : DATA.cells[SELECTED.cell].name,
    record: "", design: SELECTED.design, ...changes };
  const words = IN_HASH.filter((name) => now[name]).map((name) => `${name}=${encodeURIComponent(now[name])}`);
  return "#" + words.join("&");
}
function readHash() {
  const asked = Object.fromEntries(location.hash.slice(1).split("&").filter((w) => w.includes("="))
    .map((w) => [w.slice(0, w.indexOf("=")), decodeURIComponent(w.slice(w.indexOf("=") + 1))]));
  const record = asked.record && BY_ID.get(asked.record);
  if (DATA.devices.some((d) => d.key === asked.device)) SELECTED.device = asked.device;
  if (["burst", "sustained"].includes(asked.state)) SELECTED.state = asked.state;
  if (DATA.designs.includes(asked.design)) SELECTED.design = asked.design;
  SELECTED.record = record ? record.id : "";
  const cell = record ? record.cell : CELL_INDEX.get(asked.cell);
  if (cell !== undefined) { SELECTED.cell = cell; SELECTED.phase = DATA.cells[cell].phase; }
  if (record) SELECTED.device = record.device;
  return Object.keys(asked).length > 0;
}
function go(changes) { // selects, and leaves an address that brings one back here
  const hash = hashOf(changes);
  if (location.hash === hash) { readHash(); drawAll(); } else location.hash = hash;
}

// ---------------------------------------------------------------- what a record says
function tip(p) {
  const s = stats(p), r = p.resources == null ? {} : DATA.resources[p.resources];
  return [element("strong", {}, shownName(p)), facts([
    ["cell", p.place.name], ["time", s ? `${micros(s[0])} µs (${micros(s[1])} to ${micros(s[2])}, ${s[3]} samples)` : null],
    ["of limit", percent(share(p))], ["rate", s ? `${number(p.flops / s[0] / 1e6, 0)} TFLOP/s, ${number(p.bytes / s[0] / 1e6, 2)} TB/s` : null],
    ["registers", r.registers], ["record", `${p.id}, ${p.at.slice(0, 10)}`],
  ])];
}
const said = (p) => `${shownName(p)} on ${p.place.name}: ${micros(us(p))} microseconds, ${percent(share(p))} of the limit`;
