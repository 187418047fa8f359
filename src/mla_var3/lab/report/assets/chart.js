"use strict";
// Pictures: a Vega-Lite form from the page's data, its rows, and what a pointer or the keyboard does on its marks.
const VIEWS = new Map(); // element id -> { result, rows by key }
const DRAWING = new Map(); // element id -> number of the newest drawing, so that a slow older one is dropped

function room(id) { return Math.max(220, $(id).clientWidth || document.documentElement.clientWidth - 32); }

// rows: each with `tip`, the key of what it shows. open(row): on a click. show(row): elements for the pointer.
async function draw(id, name, datasets, { change, open, show } = {}) {
  const turn = (DRAWING.get(id) || 0) + 1;
  DRAWING.set(id, turn);
  const holder = $(id);
  if (!datasets.rows.length) {
    const old = VIEWS.get(id);
    if (old) { old.result.finalize(); VIEWS.delete(id); }
    holder.replaceChildren(element("p", { class: "note" }, "Nothing was measured that passes the filters."));
    return;
  }
  const spec = JSON.parse(JSON.stringify(DATA.specs[name]));
  const narrow = room(id) < 600;
  if (NAMED.has(name)) datasets = { ...datasets, rows: labelled(spec, datasets.rows, room(id)) };
  else if (typeof spec.width === "number") spec.width = Math.min(spec.width * 1.6, Math.max(140, room(id) - (name === "ladder" ? 180 : 110)));
  spec.datasets = datasets;
  spec.config.legend.columns = narrow ? 1 : 3;
  for (const part of [spec, ...(spec.layer || [])]) onlyUsed(part.encoding || {}, Object.values(datasets).flat());
  if (change) change(spec, narrow);
  const rows = new Map(datasets.rows.map((row) => [row.tip, row]));
  const place = element("div");
  const result = await vegaEmbed(place, spec, {
    mode: "vega-lite", renderer: "svg", ast: false, downloadFileName: `mla-${name}`,
    actions: { export: { svg: true, png: true }, source: false, compiled: false, editor: false },
    tooltip: (_, event, item, value) => { const row = value == null ? null : rows.get(value); row ? hover(event, show(row)) : hide(); },
  });
  if (DRAWING.get(id) !== turn) { result.finalize(); return; }
  const old = VIEWS.get(id);
  if (old) old.result.finalize();
  const menu = place.querySelector("summary");
  if (menu) menu.setAttribute("aria-label", "Save this picture");
  holder.replaceChildren(place);
  VIEWS.set(id, { result, rows });
  result.view.addEventListener("click", (_, item) => {
    const row = item && item.datum && rows.get(item.datum.tip);
    if (row && open) { hide(); open(row); }
  });
  reach(place, rows, open, show);
}

// Pictures whose rows have a name on the left. A long one, or one on a narrow screen, stands above its row, in lines.
const NAMED = new Set(["cell", "languages", "instructions", "moves"]), LETTER = 6.3, LINE = 13;
function labelled(spec, rows, room) {
  const field = rows[0].name === undefined ? "cell" : "name", longest = Math.max(...rows.map((row) => row[field].length)) * LETTER;
  const above = longest > 0.36 * room, width = Math.min(spec.width * 1.6, Math.max(140, room - (above ? 30 : longest + 40)));
  spec.width = above ? Math.min(width, room - 30) : width;
  const axis = spec.config.axisY;
  axis.labelLimit = 0;
  axis.labelExpr = "split(datum.label, '\\n')";
  if (!above) return rows;
  const wrapped = rows.map((row) => ({ ...row, [field]: lines(row[field], Math.floor((room - 30) / LETTER)).join("\n") }));
  const most = Math.max(...wrapped.map((row) => row[field].split("\n").length));
  spec.height.step = 16 + 2 * most * LINE; // marks stand in the middle of their row
  Object.assign(axis, { labelAlign: "left", labelPadding: -2, labelBaseline: "bottom", labelOffset: -spec.height.step / 2 + LINE, tickSize: 0, labelLineHeight: LINE });
  return wrapped;
}
function lines(text, most) {
  const found = [""];
  for (const word of text.split(/(?<=[ ,/_+])/)) {
    if (found[found.length - 1].length + word.length > most) found.push("");
    found[found.length - 1] += word;
  }
  return found;
}

// Leaves in the legends what the rows hold; colours stay as they are.
function onlyUsed(encoding, rows) {
  for (const channel of Object.values(encoding)) {
    if (!channel.legend || !channel.scale || !channel.scale.domain) continue;
    const held = new Set(rows.map((row) => row[channel.field]));
    channel.legend.values = channel.scale.domain.filter((value) => held.has(value));
  }
}

// ---------------------------------------------------------------- pointer
function hover(event, content) {
  const box = $("hover");
  box.replaceChildren(...content);
  box.hidden = false;
  const { clientWidth: w, clientHeight: h } = document.documentElement;
  box.style.left = `${Math.max(4, Math.min(event.clientX + 14, w - box.offsetWidth - 6))}px`;
  box.style.top = `${event.clientY + 16 + box.offsetHeight < h ? event.clientY + 16 : Math.max(4, event.clientY - box.offsetHeight - 12)}px`;
}
// Shows the focused mark's box again at its place. Focus scrolls to a mark that is out of sight, behind which it must not vanish.
let follow = null;
function hide() { follow = null; $("hover").hidden = true; }
addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
addEventListener("scroll", () => { if (follow) follow(); else hide(); }, { passive: true });

// ---------------------------------------------------------------- keyboard
// One stop for Tab in each picture; arrow keys go to the nearest mark in that direction, Enter opens it.
function reach(place, rows, open, show) {
  const taken = new Set();
  const marks = [...place.querySelectorAll("svg path")].filter((node) => {
    const item = node.__data__, key = item && item.datum && item.datum.tip;
    if (!rows.has(key) || taken.has(key) || !["rect", "symbol"].includes(item.mark.marktype)) return false;
    taken.add(key);
    return true;
  });
  marks.forEach((node, index) => {
    const row = rows.get(node.__data__.datum.tip);
    node.setAttribute("tabindex", index ? "-1" : "0");
    node.setAttribute("role", open ? "button" : "img");
    node.setAttribute("aria-label", row.said);
    node.removeAttribute("aria-roledescription");
    node.addEventListener("focus", () => {
      follow = () => {
        const box = node.getBoundingClientRect();
        hover({ clientX: box.right, clientY: box.bottom - 10 }, show(row));
      };
      follow();
    });
    node.addEventListener("blur", hide);
    node.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); if (open) open(row); return; }
      const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!way) return;
      event.preventDefault();
      const next = nearest(node, marks, way);
      if (next) { node.setAttribute("tabindex", "-1"); next.setAttribute("tabindex", "0"); next.focus(); }
    });
  });
}
function nearest(node, marks, [dx, dy]) {
  const middle = (n) => { const b = n.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]; };
  const [x, y] = middle(node);
  let best = null, least = Infinity;
  for (const other of marks) {
    if (other === node) continue;
    const [ox, oy] = middle(other), along = (ox - x) * dx + (oy - y) * dy, across = Math.abs((ox - x) * dy) + Math.abs((oy - y) * dx);
    if (along > 0.5 && along + 3 * across < least) { least = along + 3 * across; best = other; }
  }
  return best;
}
