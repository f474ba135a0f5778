// The page: fetches a run once, then receives only what is new.
import { Chart, count, shown, smooth } from "./charts.js";
import { $, lampText, make, showFigures, showHalt, showLamps, showLanes, showNotes, showSamples, showSaves, showStatus, showStrip } from "./panels.js";

const COLORS = ["--optimizer", "--save", "--backward", "--exchange", "--forward"];
const OPTIONAL = ["mfu", "accuracy"], SMALL = ["tokens_per_s", "grad_norm", "lr", ...OPTIONAL];
const MOST_POINTS = 2400, RUNS_MILLISECONDS = 10_000;
const page = { runs: [], key: "", run: null, compared: new Map(), range: null, zoomed: null, log: null, stream: null, drawn: 0 };

async function fetchJson(path) {
  const answer = await fetch(path);
  if (answer.status === 401) location.assign("/login");
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
const linkState = (text, lamp) => { $("link").textContent = text; $("link").className = lamp; };
const showFailure = error => linkState(error.message, "waiting");

async function open(key) {
  page.stream?.close();
  page.key = key;
  const run = await fetchJson(`/api/runs/${key}`);
  if (key !== page.key) return; // another run was chosen meanwhile
  page.run = Object.assign(run, { key });
  page.zoomed = null;
  if (page.range) await zoom(page.range);
  render();
  listen();
  if (page.run.partial) linkState("loading all steps", "partial");
}

function listen() {
  page.stream?.close();
  if (document.hidden || !page.run) return;
  const run = page.run, stream = page.stream = new EventSource(`/api/runs/${run.key}/stream?after=${run.cursor}`);
  stream.onopen = () => linkState("live", "running");
  stream.onerror = () => linkState(stream.readyState === EventSource.CLOSED ? "not connected" : "reconnecting", "waiting");
  stream.onmessage = message => { run.cursor = message.lastEventId; merge(run, JSON.parse(message.data)); render(isDue()); };
  stream.addEventListener("reload", () => open(page.key).catch(showFailure));
}

// Whether to redraw the curves. Drawing takes processor time from training, and a long curve changes little in a second.
function isDue() {
  const pause = page.run.curve.step.length < 200 || page.run.status.state !== "running" ? 0 : 4000;
  return performance.now() - page.drawn > pause;
}
const isSeen = element => { const box = element.getBoundingClientRect(); return box.bottom > 0 && box.top < innerHeight; };

// Announce a new state and changed lamps to screen readers, but no numbers, which change all the time.
function announce(run, delta) {
  const news = delta.status && delta.status.state !== run.status.state ? [`The run is ${delta.status.state}.`] : [];
  for (const [seat, worker] of (delta.workers ?? []).entries())
    if (worker.lamp !== run.workers[seat]?.lamp) news.push(`Rank ${worker.rank}: ${lampText(worker.lamp)}.`);
  if (news.length) speak(news.slice(0, 6).join(" "));
}

// Merge a delta into the data of a run.
function merge(run, delta) {
  const { rows, cut, strip, ...sections } = delta;
  announce(run, delta);
  Object.assign(run, sections);
  const curve = run.curve;
  if (cut != null) {
    const keep = curve.step.findIndex(step => step > cut);
    if (keep >= 0) for (const name in curve) curve[name].length = keep;
    run.strip = run.strip.filter(([step]) => step <= cut);
  }
  if (rows) {
    for (const name in rows) if (!(name in curve) && rows[name].some(value => value != null)) curve[name] = curve.step.map((_, i) => curve[name.replace(/_(low|high)$/, "")]?.[i] ?? null);
    for (const name in curve) curve[name].push(...(rows[name] ?? rows[name.replace(/_(low|high)$/, "")] ?? rows.step.map(() => null)));
    if (curve.step.length > MOST_POINTS) fetchJson(`/api/runs/${run.key}/curve?from=0&to=1e15`).then(whole => { run.curve = whole; render(); });
  }
  if (strip) run.strip = [...run.strip, ...strip].slice(-160);
}

async function zoom(range) {
  const wanted = page.range = range && range[1] - range[0] >= 2 ? range : null;
  const found = wanted && await fetchJson(`/api/runs/${page.run.key}/curve?from=${wanted[0]}&to=${wanted[1]}`);
  if (wanted !== page.range) return; // another range or run was chosen meanwhile
  page.zoomed = found;
  render();
}

const readouts = name => found => {
  if (found?.values[0]) $(`v-${name}`).textContent = `${shown(found.values[0][1])} at ${count(found.step)}`;
};
const speak = text => { $("spoken").textContent = text; };
const lossChart = new Chart($("loss-chart"), { onZoom: zoom, onCursor: showLegend, onSpeak: speak });
const charts = Object.fromEntries(SMALL.map(name => [name, new Chart($(`c-${name}`), { onZoom: zoom, onCursor: readouts(name), onSpeak: speak, small: true })]));

function lossLines() {
  const run = page.run, curve = page.zoomed ?? run.curve, lines = [];
  const bold = smooth(curve.loss), same = bold === curve.loss;
  if (!same || curve.loss_low) lines.push({ label: "raw", x: curve.step, y: curve.loss, color: "--blue", width: 1, alpha: "55", quiet: true, low: curve.loss_low, high: curve.loss_high });
  for (const again of run.redone) lines.push({ label: "done again", x: again.step, y: again.loss, color: "--grey", width: 1.3, dash: [4, 4], quiet: true });
  lines.push({ label: "training", x: curve.step, y: bold, color: "--blue", width: 2 });
  const evals = run.evals.filter(each => each[1] != null && (!page.range || (each[0] >= page.range[0] && each[0] <= page.range[1])));
  if (evals.length) lines.push({ label: "validation", x: evals.map(each => each[0]), y: evals.map(each => each[1]), color: "--orange", width: 1.6, points: evals.length < 60 });
  let next = 0;
  for (const { name, curve: other } of page.compared.values()) lines.push({ label: name, x: other.step, y: smooth(other.loss), color: COLORS[next++ % COLORS.length], width: 1.6 });
  return lines;
}

function showLegend(found) {
  const items = (found?.values ?? lossChart.lines.filter(line => !line.quiet).map(line => [line, line.y.findLast(value => value != null)])).map(([line, value]) => {
    const key = make("i");
    key.style.setProperty("--c", `var(${line.color})`);
    return make("span", {}, key, `${line.label} ${shown(value)}`);
  });
  const dashed = (label, name) => { const key = make("i", { class: "dash" }); key.style.setProperty("--c", name); items.push(make("span", {}, key, label)); };
  if (page.run?.status.floor) dashed(`floor ${shown(page.run.status.floor, 3)}`, "var(--soft)");
  if (page.run?.redone.length) dashed("done again", "var(--grey)");
  if (found) items.unshift(make("span", {}, `step ${count(found.step)}`));
  $("loss-legend").replaceChildren(...items);
}

function render(curves = true) {
  const run = page.run, curve = run.curve, last = Object.fromEntries(Object.keys(curve).map(name => [name, curve[name].at(-1)]));
  showStatus(run.status, last);
  showLamps(run.workers);
  showHalt(run.halt, run.status);
  showFigures(run, last);
  showSamples(run.samples);
  showSaves(run.saves);
  showNotes(run.notes);
  if (!curves) return;
  page.drawn = performance.now();
  document.querySelector(".strip").hidden = !run.strip.length;
  if (isSeen(document.querySelector(".strip"))) showStrip(run.strip);
  if (run.lanes.length) showLanes(run.lanes, run.generations, run.status);
  document.querySelector(".lanes").hidden = !run.lanes.length;
  document.querySelector("main").classList.toggle("before-steps", !curve.step.length);
  const view = page.zoomed ?? curve, options = { range: page.range };
  if (!curve.step.length) return;
  lossChart.show(lossLines(), { ...options, rule: run.status.floor ?? null, log: isLog() });
  $("log").setAttribute("aria-pressed", String(isLog()));
  if (lossChart.index == null) showLegend(null);
  const first = curve.loss.find(value => value != null);
  $("loss-chart").setAttribute("aria-label", `Training loss from ${shown(first)} at step ${count(curve.step[0])} to ${shown(last.loss)} at step ${count(last.step)}. Arrow keys read it out.`);
  const missing = OPTIONAL.filter(name => !curve[name]?.some(value => value != null));
  for (const name of OPTIONAL) $(`${name}-panel`).hidden = missing.includes(name);
  document.querySelector(".grid").classList.toggle("four", missing.length < OPTIONAL.length);
  for (const name of SMALL) {
    if (missing.includes(name) || !isSeen($(`c-${name}`))) continue;
    const raw = { label: name, x: view.step, y: view[name] ?? [], color: "--blue", low: view[`${name}_low`], high: view[`${name}_high`] }, trend = smooth(raw.y);
    charts[name].show(name === "lr" || trend === raw.y ? [{ ...raw, width: 1.5 }] : [{ ...raw, width: 1, alpha: "4d" }, { ...raw, y: trend, low: null, high: null, width: 1.6, quiet: true }], options);
    if (charts[name].index == null) $(`v-${name}`).textContent = shown(last[name]);
    $(`c-${name}`).setAttribute("aria-label", `Now ${shown(last[name])}. Arrow keys read it out.`);
  }
  $("reset").hidden = !page.range;
  if ($("loss-table").closest("details").open) showTable();
}

function showTable() {
  const curve = page.zoomed ?? page.run.curve, every = Math.max(1, Math.floor(curve.step.length / 25)), names = ["step", "loss", "tokens_per_s", "grad_norm", "lr"];
  const rows = curve.step.map((_, i) => i).filter(i => i % every === 0 || i === curve.step.length - 1);
  $("loss-table").replaceChildren(make("tr", {}, ...["step", "loss", "tokens per second", "gradient norm", "learning rate"].map(name => make("th", { scope: "col" }, name))),
    ...rows.map(i => make("tr", {}, ...names.map(name => make("td", {}, name === "step" ? count(curve[name][i]) : shown(curve[name]?.[i]))))));
}

function showRuns() {
  const focused = $("runs").contains(document.activeElement) && document.activeElement.id;
  $("runs").hidden = page.runs.length < 2;
  let next = 0;
  $("runs").replaceChildren(...page.runs.map((run, i) => {
    const item = make("div", { class: `run ${run.state} ${run.key === page.key ? "now" : ""}` });
    const name = make("button", { id: `run-${run.key}`, "aria-current": run.key === page.key ? "true" : null, title: `${run.name}: ${run.state}, step ${count(run.step)} (${i + 1})` }, make("i", { class: "dot", "aria-hidden": "true" }), make("span", {}, run.name));
    name.onclick = () => choose(run.key);
    item.append(name);
    if (run.key !== page.key) {
      const on = page.compared.has(run.key), add = make("button", { id: `add-${run.key}`, class: "add", "aria-pressed": String(on), "aria-label": `compare with ${run.name}`, title: "Compare" }, on ? "●" : "+");
      if (on) add.style.setProperty("--series", `var(${COLORS[next++ % COLORS.length]})`);
      add.onclick = () => compare(run);
      item.append(add);
    }
    return item;
  }));
  if (focused) $(focused)?.focus({ preventScroll: true });
}
async function refreshRuns() {
  setTimeout(refreshRuns, RUNS_MILLISECONDS);
  if (document.hidden) return;
  page.runs = await fetchJson("/api/runs").catch(() => page.runs); // the state of the link says that nobody answers
  showRuns();
}
async function choose(key) {
  page.compared.delete(key);
  page.range = null;
  location.hash = key;
  await open(key).catch(showFailure);
  showRuns();
}
async function compare(run) {
  if (!page.compared.delete(run.key)) page.compared.set(run.key, { name: run.name, curve: (await fetchJson(`/api/runs/${run.key}`)).curve });
  showRuns();
  render();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("andon-theme", theme); } catch { /* storage is not available */ }
  if (page.run) render();
}
const isDark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const toggleLog = () => { page.log = !isLog(); render(); };
// The viewer's choice; by default logarithmic if the loss has fallen to a sixth, because its end would look flat.
function isLog() {
  const known = page.run.curve.loss.filter(value => value > 0);
  return page.log ?? (known.length > 50 && Math.max(...known) > 6 * Math.min(...known));
}

$("theme").onclick = () => setTheme(isDark() ? "light" : "dark");
$("help-open").onclick = () => $("help").showModal();
$("log").onclick = toggleLog;
$("reset").onclick = () => zoom(null);
$("loss-table").closest("details").addEventListener("toggle", showTable);
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open || !page.run) return;
  const digit = /^Digit([1-9])$/.exec(event.code)?.[1], run = page.runs[digit - 1];
  if (run && event.shiftKey && run.key !== page.key) compare(run);
  else if (run && !event.shiftKey) choose(run.key);
  else if (event.key === "t") $("theme").click();
  else if (event.key === "l") toggleLog();
  else if (event.key === "?") $("help").showModal();
  else if (event.key === "Escape" && page.range) zoom(null);
});
document.addEventListener("visibilitychange", () => document.hidden ? page.stream?.close() : listen());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.run && render());
let moved;
for (const what of ["resize", "scroll"]) addEventListener(what, () => { clearTimeout(moved); moved = setTimeout(() => page.run && render(), 150); }, { passive: true });

try { document.documentElement.dataset.theme = localStorage.getItem("andon-theme") ?? ""; } catch { /* storage is not available */ }
if (!document.documentElement.dataset.theme) delete document.documentElement.dataset.theme;
async function begin() {
  page.runs = await fetchJson("/api/runs");
  const wanted = page.runs.find(run => run.key === location.hash.slice(1)) ?? page.runs.toSorted((a, b) => b.time - a.time)[0];
  if (!wanted) { $("name").textContent = "No run yet"; $("state").textContent = "This page shows the first run when it starts."; setTimeout(begin, 2000); return; }
  await open(wanted.key);
  showRuns();
  setTimeout(refreshRuns, RUNS_MILLISECONDS);
}
begin().catch(error => { $("name").textContent = "The board does not answer"; $("state").textContent = error.message; });
