"use strict";
// "Find my shape": what the dispatcher picks for a problem, for requests of one length. Python computed all of it; this
// looks it up. asked: { h, s, b, t, causal }, of SELECTED.device.
const FINDER = DATA.finder, NAMES = ["h", "s", "b", "t"], [NOBODY, DEPENDS] = [-1, -2];
const command = (asked) => `mla-var3 dispatch show --b ${asked.b} --s ${asked.s} --h ${asked.h} --t ${asked.t}${asked.causal ? " --causal" : ""} --device ${SELECTED.device}`;

// The shape of the table that is nearest to one, size by size, and what is expected of it; null where nothing is.
function nearShape(asked, device) {
  const { h, s, b, t } = FINDER.table, shape = {}, apart = (x, y) => Math.abs(Math.log(x / y));
  let row = 0;
  for (const [name, sizes] of [["h", h], ["s", s], ["b", b], ["t", t]]) {
    const i = sizes.reduce((best, size, j) => apart(size, asked[name]) < apart(sizes[best], asked[name]) ? j : best, 0);
    shape[name] = sizes[i];
    row = row * sizes.length + i;
  }
  const [label, us, limit, library, theirs] = device.times[row];
  if (us === undefined) return null;
  const peer = library === undefined ? null : { name: device.labels[library], us: theirs, ratio: theirs / us };
  return { shape: { ...shape, causal: shape.s > 1 }, label: device.labels[label], us, limit, library: peer };
}

// { label, of the pick; point, its record where it was measured; library, the fastest one; near } or { why } not.
function answerFor(asked) {
  const device = FINDER.devices[SELECTED.device];
  if (!device) return { why: `The dispatcher knows nothing of ${SELECTED.device}.` };
  if (NAMES.some((n) => !Number.isSafeInteger(asked[n]) || asked[n] < 1)) return { why: "Heads, query tokens, requests and context are whole numbers of at least 1." };
  const kind = FINDER.kinds.findIndex(([s, causal]) => s === asked.s && causal === asked.causal);
  if (kind < 0 || asked.h > FINDER.heads) {
    const tokens = [...new Set(FINDER.kinds.map(([s]) => s))].join(", ");
    return { why: `This page answers for up to ${FINDER.heads} heads and ${tokens} query tokens. For others, where mla-var3 is installed:`, command: command(asked) };
  }
  const picked = device.picks[kind][asked.h - 1];
  if (picked === NOBODY) return { why: "No version takes this problem. Why:", command: command(asked) };
  if (picked === DEPENDS) return { why: "What is picked depends on batch and context here:", command: command(asked) };
  const label = device.labels[picked];
  const cells = DATA.cells.map((c, i) => i).filter((i) => NAMES.every((n) => DATA.cells[i][n] === asked[n]) && DATA.cells[i].causal === asked.causal);
  const cell = cells.find((i) => DATA.cells[i].plain) ?? -1;
  const here = POINTS.filter((p) => p.newest && p.cell === cell && p.device === SELECTED.device && us(p) != null && !p.fixed);
  // What the records of the cell say of the pick: the one that speaks for it there, as in every other part.
  const point = here.find((p) => p.name === label) || null, peer = libraryOf(here, point);
  const near = point ? null : nearShape(asked, device);
  const library = point && peer ? { name: peer.name, us: us(peer), ratio: faster(point, peer), point: peer } : near && near.library;
  return { label, point, library, near, device, cell, here, others: cells.filter((i) => i !== cell && POINTS.some((p) => p.newest && p.cell === i && p.device === SELECTED.device)) };
}

function asked() {
  const said = Object.fromEntries(NAMES.map((n) => [n, Number($(`find-${n}`).value)]));
  return { ...said, causal: $("find-causal").checked && said.s > 1 };
}
function drawAnswer() {
  const shape = asked(), found = answerFor(shape);
  $("find-causal").disabled = shape.s <= 1;
  $("find-model").value = (FINDER.models.find(([name, h]) => h === shape.h && name === $("find-model").value) || [""])[0];
  if (found.why) { put("find-said", found.why, found.command ? element("pre", {}, found.command) : null); put("find-more"); return; }
  const { label, point, library, near, device, cell, here, others } = found;
  const name = element("strong", {}, label), lines = [];
  const against = !library ? "; no library was measured on this device" : `, ${times(library.ratio)} as fast as the best library, ${library.name}`;
  if (point) {
    put("find-said", name, `: ${micros(us(point))} µs, ${percent(share(point))} of what the hardware allows${against}.`, " Measured in ", SELECTED.state, ", ", recordLink(point, point.id), ` of ${point.at.slice(0, 10)}.`);
  } else if (near) {
    const { h, s, b, t } = near.shape, other = near.label === label ? "" : ` by ${near.label}`;
    put("find-said", name, ". Not measured here; near it ", `h = ${h}, s = ${s}, b = ${b}, t = ${t} should take about ${micros(near.us)} µs${other}, ${percent(near.limit / near.us)} of what the hardware allows${against}.`);
    lines.push("Expected from the records around it, between burst and sustained.");
    if (device.error) lines.push(`Of cells that were left out, nine of ten such times were within ${percent(device.error, 0)}.`);
  } else put("find-said", name, ". No record of this device says what it takes.");
  const rival = versionsOf(here, runsOf(here)).find((p) => p.version_of.live);
  if (point && rival && rival.kernel !== point.kernel && faster(rival, point) > 1) lines.push(`Measured faster here: ${rival.name}, ${micros(us(rival))} µs.`);
  if (point && library && library.point.run !== point.run) lines.push("The two were measured in different runs.");
  if (!point) lines.push("For this very shape, where mla-var3 is installed:");
  put("find-more", lines.join(" "), ...(point ? [] : [element("pre", {}, command(shape))]), ...(cell >= 0 && here.length ? [" All contenders: ", cellLink(cell), "."] : []),
    ...(others.length ? [" The same sizes with other lengths, caches or dtypes: ", ...others.slice(0, 4).flatMap((i) => [cellLink(i), " "])] : []));
  return found;
}
