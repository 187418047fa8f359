"use strict";
// "Find my shape": what the dispatcher picks for a problem, as dispatch/model.py and dispatch/selection.py do it, for
// requests of one length. A test asks both. asked: { h, s, b, t, causal }, of SELECTED.device.
const FINDER = DATA.finder, NAMES = ["h", "s", "b", "t"];
const LATENT = 512, ROPE = 64, BYTES = 2; // of MlaProblem()

function placeOf({ h, s, b, t, causal }, device) {
  const masked = causal && s > 1;
  let pairs = s * t;
  if (masked) { pairs = 0; for (let i = 0; i < s; i++) pairs += Math.max(t - s + i + 1, 0); }
  const flops = b * pairs * 2 * (2 * LATENT + ROPE) * h;
  const bytes = (b * t * (LATENT + ROPE) + b * s * h * (2 * LATENT + ROPE)) * BYTES;
  const logs = device.rates.map(([tflops, gbps]) => Math.log(Math.max(flops / tflops / 1e6, bytes / gbps / 1e3, 1e-3)));
  const limit = Math.exp(logs.reduce((x, y) => x + y, 0) / logs.length);
  return { limit, at: [Math.log2(s * h), Math.log2(limit), Math.log2(b * Math.ceil(s * h / 64)), 0], masked: Number(masked) };
}
function predict(place, floor, points) {
  const near = points.map(([rows, limit, blocks, fill, masked, unusual, ratio, record]) => {
    const [r, l, k, f] = place.at;
    const shape = (r - rows) ** 2 + (f - fill) ** 2, work = (l - limit) ** 2 + (k - blocks) ** 2;
    return { distance: Math.sqrt(shape + 0.25 * work) + 0.5 * (unusual + (masked !== place.masked)), ratio, record };
  }).sort((a, b) => a.distance - b.distance || a.ratio - b.ratio || (a.record < b.record ? -1 : 1)).slice(0, FINDER.neighbours);
  const weights = near.map((n) => 1 / (n.distance ** 2 + FINDER.close) ** 2);
  const mean = near.reduce((sum, n, i) => sum + weights[i] * Math.log(n.ratio), 0) / weights.reduce((x, y) => x + y, 0);
  return { us: (place.limit + floor) * Math.exp(mean), distance: near[0].distance, records: near.map((n) => n.record) };
}
// Recipes by predicted time, those far from what was measured later; a base version after the later ones of its family.
function ranked(asked, device, recipes) {
  const place = placeOf(asked, device), close = (x, y) => Math.abs(Math.log(Math.max(x, 1) / Math.max(y, 1))) < 0.1;
  const guesses = recipes.filter((r) => !r.near || r.near.some(([b, t, s, h, causal]) =>
    s === asked.s && h === asked.h && causal === Number(asked.causal) && close(b, asked.b) && close(t, asked.t)))
    .map((recipe) => ({ recipe, limit: place.limit, ...predict(place, device.floor, recipe.points) }));
  const nearest = Math.min(...guesses.map((g) => g.distance));
  const doubted = (g) => {
    const later = g.recipe.version ? [] : guesses.filter((o) => o.recipe.version > 0 && o.recipe.family === g.recipe.family);
    return Math.max(g.us * Math.exp(FINDER.doubt * (g.distance - nearest)), ...later.map((o) => doubted(o) * (1 + Number.EPSILON)));
  };
  return guesses.map((g) => [doubted(g), g]).sort((a, b) => a[0] - b[0] || (a[1].recipe.label < b[1].recipe.label ? -1 : 1)).map(([, g]) => g);
}
const command = (asked) => `mla-var3 dispatch show --b ${asked.b} --s ${asked.s} --h ${asked.h} --t ${asked.t}${asked.causal ? " --causal" : ""} --device ${SELECTED.device}`;

// { pick, of the dispatcher; point, its record where it was measured; library, the fastest one } or { why } not.
function answerFor(asked) {
  const device = FINDER.devices[SELECTED.device];
  if (!device) return { why: `The dispatcher knows nothing of ${SELECTED.device}.` };
  if (NAMES.some((n) => !Number.isSafeInteger(asked[n]) || asked[n] < 1)) return { why: "Heads, query tokens, requests and context are whole numbers of at least 1." };
  const kind = FINDER.kinds.findIndex(([s, causal]) => s === asked.s && causal === asked.causal);
  if (kind < 0 || asked.h > FINDER.heads) {
    const tokens = [...new Set(FINDER.kinds.map(([s]) => s))].join(", ");
    return { why: `This page answers for up to ${FINDER.heads} heads and ${tokens} query tokens. For others, where mla-var3 is installed:`, command: command(asked) };
  }
  const order = ranked(asked, device, device.recipes).filter((g) => g.recipe.takes[kind][asked.h - 1] !== "0");
  if (!order.length) return { why: "No version that was measured takes this problem. What may take it:", command: command(asked) };
  if (order[0].recipe.takes[kind][asked.h - 1] === "?") return { why: "Whether a version takes this batch and context is not on this page:", command: command(asked) };
  const pick = order[0];
  const cells = DATA.cells.map((c, i) => i).filter((i) => NAMES.every((n) => DATA.cells[i][n] === asked[n]) && DATA.cells[i].causal === asked.causal);
  const cell = cells.find((i) => DATA.cells[i].plain) ?? -1;
  const here = POINTS.filter((p) => p.newest && p.cell === cell && p.device === SELECTED.device && us(p) != null && !p.fixed);
  // What the records of the cell say of the pick: the one that speaks for it there, as in every other part.
  const point = here.find((p) => p.name === pick.recipe.label) || null, peer = libraryOf(here, point);
  let library = null;
  if (point && peer) library = { name: peer.name, us: us(peer), ratio: faster(point, peer), measured: true, point: peer };
  else {
    const guess = ranked(asked, device, device.libraries)[0];
    if (guess) library = { name: guess.recipe.label, us: guess.us, ratio: guess.us / pick.us, measured: false, distance: guess.distance };
  }
  return { pick, point, library, device, cell, here, others: cells.filter((i) => i !== cell && POINTS.some((p) => p.newest && p.cell === i && p.device === SELECTED.device)) };
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
  const { pick, point, library, device, cell, here, others } = found;
  const time = point ? `${micros(us(point))} µs` : `about ${micros(pick.us)} µs`, of = point ? share(point) : pick.limit / pick.us;
  const against = !library ? "; no library was measured on this device" : `, ${times(library.ratio)} as fast as the best library, ${library.name}`;
  const how = point ? [" Measured in ", SELECTED.state, ", ", recordLink(point, point.id), ` of ${point.at.slice(0, 10)}.`] : [" Predicted by the dispatcher, not measured."];
  put("find-said", element("strong", {}, pick.recipe.label), `: ${time}, ${percent(of)} of what the hardware allows${against}.`, ...how);
  const rival = versionsOf(here, runsOf(here)).find((p) => p.version_of.live);
  const lines = [];
  if (point) lines.push(`The dispatcher reckons with ${number(pick.us)} µs, between burst and sustained.`);
  else {
    const spread = device.errors[pick.distance <= FINDER.near ? "near" : "far"];
    lines.push(`Between burst and sustained; ${number(pick.distance)} octaves from the nearest record${device.from === SELECTED.device ? "" : `, which is of ${device.from}`}.`);
    if (spread) lines.push(`Of cells that were left out, nine of ten such predictions were within ${percent(spread[1], 0)}.`);
    if (library) lines.push(`The library's ${micros(library.us)} µs are predicted in the same way, from its own records.`);
  }
  if (point && rival && rival.kernel !== point.kernel && faster(rival, point) > 1) lines.push(`Measured faster here: ${rival.name}, ${micros(us(rival))} µs.`);
  if (point && library && library.measured && library.point.run !== point.run) lines.push("The two were measured in different runs.");
  put("find-more", lines.join(" "), ...(cell >= 0 && here.length ? [" All contenders: ", cellLink(cell), "."] : []),
    ...(others.length ? [" The same sizes with other lengths, caches or dtypes: ", ...others.slice(0, 4).flatMap((i) => [cellLink(i), " "])] : []));
  return found;
}
