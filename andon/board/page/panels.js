// Everything on the page except the curves. Text from a run is inserted as text, never as HTML.
import { count, shown } from "./charts.js";

export const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// Create an element with attributes and children; a string becomes text.
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value != null) element.setAttribute(name, value);
  element.append(...children.filter(child => child != null && child !== ""));
  return element;
}
const svg = (tag, attributes) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};
export const duration = seconds => {
  if (seconds == null || !isFinite(seconds)) return "–";
  const all = Math.max(0, Math.round(seconds)), hours = Math.floor(all / 3600), minutes = Math.floor(all / 60) % 60;
  return hours ? `${hours} h ${String(minutes).padStart(2, "0")} min` : minutes ? `${minutes}:${String(all % 60).padStart(2, "0")} min` : `${all} s`;
};
const clock = time => new Date(time * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
export const lampText = lamp => lamp === "cord" ? "pulled the cord" : lamp;

// Whether the data of an element has changed. Unchanged elements are not rebuilt, so that selected text stays selected.
const drawn = new WeakMap();
function changed(element, value) {
  const text = JSON.stringify(value);
  if (drawn.get(element) === text) return false;
  drawn.set(element, text);
  return true;
}

export function showStatus(status, last) {
  const { state, step, steps } = status, left = steps > step ? (steps - step) * status.step_seconds : null;
  document.title = `${status.name} · ${state} · Andon`;
  $("name").textContent = status.name;
  const parts = [steps ? ` · step ${count(step)} of ${count(steps)}` : ` · step ${count(step)}`];
  if (state === "running" && left) parts.push(` · ${duration(left)} left`);
  if (state === "silent") parts.push(` · no event since ${clock(status.time)}`);
  if (status.skipped) parts.push(` · ${count(status.skipped)} skipped`);
  $("state").className = `state ${state}`;
  $("state").replaceChildren(make("b", {}, { halted: "The line stopped" }[state] ?? state[0].toUpperCase() + state.slice(1)), ...parts);
  document.querySelector(".brand").className = `brand ${state}`;
  const share = steps ? Math.min(100, 100 * step / steps) : 0;
  $("progress").className = `bar ${state === "running" ? "" : state}`;
  $("progress").setAttribute("aria-valuenow", Math.round(share));
  $("progress").firstElementChild.style.width = `${share}%`;
  const facts = [status.model, status.parameters && `${shown(status.parameters, 3)} parameters`, status.workers && `${status.workers} worker${status.workers > 1 ? "s" : ""}`, status.transport, status.folder.split("/").slice(-2).join("/")];
  $("facts").title = status.folder;
  $("facts").textContent = facts.filter(Boolean).join(" · ");
}

export function showLamps(workers) {
  if (!changed($("lamps"), workers)) return;
  $("lamps").classList.toggle("many", workers.length > 8);
  $("lamps").replaceChildren(...workers.map(each => {
    const item = make("li", { class: each.lamp, "data-rank": each.rank, title: `rank ${each.rank} ${each.host} ${each.detail}` });
    const detail = each.detail && each.lamp !== "cord" ? each.detail : "";
    item.append(make("i", { class: "lamp", "aria-hidden": "true" }), make("div", {}, make("b", {}, `rank ${each.rank}`), make("em", {}, lampText(each.lamp)), make("span", {}, detail || each.host || "unknown host")));
    return item;
  }));
}

export function showFigures(state, last) {
  const { status, evals } = state, tested = evals.at(-1), rows = [];
  const add = (name, value, note = "") => rows.push([name, value, note]);
  add("Loss", shown(last.loss), status.floor ? `floor ${shown(status.floor, 3)}` : "of the last step");
  if (tested) add("Validation", shown(tested[1]), `step ${count(tested[0])}${tested[2] == null ? "" : ` · ${shown(tested[2], 3)} bits/byte`}`);
  if (tested && tested[3] != null) add("Valid stories", `${Math.round(100 * tested[3])}%`, `step ${count(tested[0])}`);
  if (tested && tested[4] != null) add("Accuracy", `${shown(100 * tested[4], 3)}%`, `held out, step ${count(tested[0])}`);
  add("Tokens per second", shown(last.tokens_per_s, 3), status.step_seconds ? `${shown(1000 * status.step_seconds, 3)} ms a step` : "all workers");
  add("Gradient norm", shown(last.grad_norm, 3), "before clipping");
  add("Learning rate", shown(last.lr, 3), "");
  if (last.mfu != null) add("MFU", `${shown(100 * last.mfu, 3)}%`, "of the GPUs' peak");
  const saved = state.saves.filter(each => each.verdict === "verified").at(-1);
  add("Checkpoint", saved ? count(saved.step) : "–", !saved ? "none yet" : status.step > saved.step ? `${count(status.step - saved.step)} steps ago` : "up to date");
  if (changed($("figures"), rows))
    $("figures").replaceChildren(...rows.map(([name, value, note]) => make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, note || " ")))));
}

// The first two of several causes.
const shorter = cause => {
  const parts = cause.split("; ");
  return parts.length > 3 ? `${parts.slice(0, 2).join("; ")}; and ${parts.length - 2} more` : cause;
};

export function showHalt(halt, status) {
  const card = $("halt");
  card.hidden = !halt;
  if (!halt || !changed(card, halt)) return;
  const findings = (Array.isArray(halt.findings) ? halt.findings : []).filter(each => each && typeof each === "object");
  const first = findings.find(each => each.slot != null) ?? findings[0], texts = halt.texts ?? {};
  const parameters = [...new Set(findings.map(each => each.parameter).filter(Boolean))];
  const heading = make("h2", {}, make("span", {}, "The line stopped"), ` at step ${count(halt.step)}`);
  const facts = make("table");
  const fact = (name, value) => value != null && value !== "" && facts.append(make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, String(value))));
  if (first) {
    fact("Worker", `rank ${first.rank} on ${first.host}`);
    fact("Slot", first.slot ?? "not reproduced when computed again: a transient fault");
    fact("Parameter", first.parameter && `${first.parameter}${parameters.length > 1 ? ` and ${parameters.length - 1} more` : ""}`);
    fact("Found", first.count && `${first.kind} in ${count(first.count)} element${first.count > 1 ? "s" : ""}, first at ${count(first.first)}`);
    fact("Samples", (first.samples ?? []).join(", "));
  }
  fact("Weights", halt.sound ? `stay at step ${count(halt.committed)}: nothing of step ${count(halt.step)} touched them` : "ranks hold different bits, so nothing was saved");
  const named = [...new Set([...(first?.samples ?? []).map(String), ...Object.keys(texts)])].filter(window => window in texts);
  const quotes = named.slice(0, 4).map(window => make("blockquote", { tabindex: 0 }, make("b", {}, `sample ${window}`), String(texts[window]).trim()));
  const todo = make("div", { class: "todo" });
  const task = (name, command) => todo.append(make("span", {}, name), make("code", {}, command));
  if (first?.samples?.length) task("Look at the samples", `andon data show ${status.folder} ${typeof first.samples[0] === "string" ? "--samples" : "--windows"} ${first.samples.slice(0, 8).join(",")}`);
  task("Go on from the last checkpoint", "the same command, without --fault");
  if (halt.sound) task("Skip such steps", "the same command with --on_nonfinite skip");
  const left = make("div", {}, make("h3", {}, "What was found"), facts, make("h3", {}, "What to do next"), todo), right = make("div", {}, make("h3", {}, "The samples"), ...(quotes.length ? quotes : [make("p", { class: "soft" }, "This halt names no samples.")]));
  card.replaceChildren(heading, make("p", { class: "cause", title: String(halt.cause) }, shorter(String(halt.cause))), make("div", { class: "cols" }, left, right));
}

export function showSamples(samples) {
  if (!changed($("samples"), samples)) return;
  const items = samples.toReversed().map(each => make("li", {}, make("b", {}, `step ${count(each.step)}`), make("p", {}, each.text)));
  $("samples").replaceChildren(...(items.length ? items : [make("li", { class: "empty" }, "No sample yet.")]));
}

export function showSaves(saves) {
  if (!changed($("saves"), saves)) return;
  const head = make("tr", {}, ...["step", "time", "took", "stall", "verdict"].map((name, i) => make("th", { scope: "col", class: i && i < 4 ? "r" : null }, name)));
  const rows = saves.toReversed().map(each => make("tr", { class: each.verdict, title: each.reason }, make("td", {}, count(each.step)), make("td", { class: "r" }, clock(each.time)),
    make("td", { class: "r" }, each.seconds == null ? "–" : `${shown(each.seconds, 2)} s`), make("td", { class: "r" }, each.stall_ms == null ? "–" : `${shown(each.stall_ms, 2)} ms`),
    make("td", {}, make("i", { class: "dot" }), each.verdict === "verified" ? "verified" : `${each.verdict}: ${each.reason.slice(0, 90)}`)));
  $("saves").replaceChildren(head, ...(rows.length ? rows : [make("tr", {}, make("td", { colspan: 5, class: "soft" }, "None yet."))]));
}

export function showNotes(notes) {
  document.querySelector(".notes").hidden = !notes.length;
  if (changed($("notes"), notes)) $("notes").replaceChildren(...notes.toReversed().map(each => make("li", {}, make("time", {}, clock(each.time)), each.text)));
}

const PHASES = ["forward", "backward", "exchange", "optimizer", "save"];
const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${PHASES.includes(name) ? name : "other"}`).trim();

// A row per worker and a bar per step: the time of each phase. A worker that waits for others has a long exchange.
export function showStrip(strip) {
  const ranks = Math.max(0, ...strip.map(([, times]) => Math.max(0, ...Object.values(times).map(each => each.length))));
  if (!ranks) return;
  const found = new Set(strip.flatMap(([, times]) => Object.keys(times))), names = [...PHASES.filter(name => found.has(name)), ...[...found].filter(name => !PHASES.includes(name)).sort()];
  if (changed($("strip-legend"), names)) $("strip-legend").replaceChildren(...names.map(name => { const key = make("i", { class: "box" }); key.style.setProperty("--c", color(name)); return make("span", {}, key, name === "exchange" ? "exchange (waiting included)" : name); }));
  const height = ranks > 16 ? 16 : ranks > 4 ? 30 : 46, rows = $("strip");
  while (rows.children.length > ranks) rows.lastChild.remove();
  while (rows.children.length < ranks) rows.append(make("div", { class: "lane" }, make("div", { class: "who" }), make("canvas", { "aria-hidden": "true" }), make("div", {}, make("div", { class: "took" }), make("div", { class: "share", "aria-hidden": "true" }))));
  const totals = strip.flatMap(([, times]) => Array.from({ length: ranks }, (_, rank) => names.reduce((sum, name) => sum + (times[name]?.[rank] ?? 0), 0))).sort((a, b) => a - b);
  const highest = Math.max(1e-9, Math.min(totals.at(-1), 1.6 * totals[Math.floor(totals.length * 0.9)]));
  for (let rank = 0; rank < ranks; rank++) {
    const row = rows.children[rank], canvas = row.children[1], ratio = devicePixelRatio || 1;
    row.children[0].textContent = `rank ${rank}`;
    canvas.style.height = `${height}px`;
    const width = canvas.clientWidth, bar = width / 160;
    canvas.width = width * ratio; canvas.height = height * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const sums = Object.fromEntries(names.map(name => [name, 0]));
    strip.slice(-160).forEach(([, times], i, shownSteps) => {
      let y = height;
      const x = width - (shownSteps.length - i) * bar;
      for (const name of names) {
        const took = times[name]?.[rank] ?? 0, tall = height * took / highest;
        sums[name] += took;
        context.fillStyle = color(name);
        context.fillRect(x, y - tall, Math.max(1, bar - (bar > 3 ? 1 : 0.25)), tall);
        y -= tall;
      }
    });
    const all = Object.values(sums).reduce((a, b) => a + b, 0) || 1, [took, share] = row.children[2].children, computing = (sums.forward ?? 0) + (sums.backward ?? 0);
    took.textContent = `${shown(all / strip.length, 3)} ms · ${Math.round(100 * computing / all)}% computing`;
    share.replaceChildren(...names.map(name => { const part = make("i"); part.style.width = `${100 * sums[name] / all}%`; part.style.background = color(name); return part; }));
    row.setAttribute("aria-label", `rank ${rank}: ${names.map(name => `${name} ${Math.round(100 * sums[name] / all)}%`).join(", ")}`);
    row.setAttribute("role", "img");
  }
  $("strip-note").textContent = `Steps ${count(strip[0][0])} to ${count(strip.at(-1)[0])}. A worker that computes longer makes the others wait in exchange.`;
}

// A lane per worker over time: when it took part, how that ended, and when the membership changed.
export function showLanes(lanes, generations, status) {
  if (!changed($("lanes"), [lanes, generations, status.state === "running" ? Math.floor(status.time / 2) : status.time, $("lanes").clientWidth])) return;
  const spans = lanes.flatMap(lane => lane.spans), from = Math.min(...spans.map(each => each.start)), to = Math.max(status.time, ...spans.map(each => each.end ?? 0), from + 1);
  const width = $("lanes").clientWidth || 500, left = 56, tall = lanes.length > 16 ? 9 : 18, bottom = lanes.length * tall + 4;
  const at = time => left + (width - left - 4) * (time - from) / (to - from);
  const picture = svg("svg", { height: bottom + 22, viewBox: `0 0 ${width} ${bottom + 22}`, role: "img", "aria-label": `${lanes.length} workers, ${generations.length} generations over ${duration(to - from)}` });
  for (let part = 0; part <= 4; part++) {
    const time = from + (to - from) * part / 4, label = svg("text", { x: at(time), y: bottom + 17, "text-anchor": part === 0 ? "start" : part === 4 ? "end" : "middle" });
    picture.append(svg("line", { class: "tick", x1: at(time), x2: at(time), y1: 0, y2: bottom }));
    label.textContent = part ? duration(time - from) : clock(from);
    picture.append(label);
  }
  for (const each of generations) picture.append(svg("line", { class: "gen", x1: at(each.time), x2: at(each.time), y1: 0, y2: bottom }));
  lanes.forEach((lane, i) => {
    if (tall > 9 || i % 4 === 0) { const label = svg("text", { x: 0, y: i * tall + tall - 5 }); label.textContent = `rank ${lane.rank}`; picture.append(label); }
    for (const each of lane.spans) {
      const end = each.end ?? to, how = { killed: "lost", lost: "lost", halted: "cord", stopped: "stopped", released: "stopped", done: "done" }[each.how] ?? "open";
      const bar = svg("rect", { class: `span ${how === "lost" || how === "cord" ? "done" : how}`, x: at(each.start), width: Math.max(2, at(end) - at(each.start)), y: i * tall + 3, height: tall - 6, rx: 3 });
      const title = svg("title", {}); title.textContent = `rank ${lane.rank}: ${clock(each.start)} to ${each.end ? clock(each.end) : "now"} ${each.how}`; bar.append(title);
      picture.append(bar);
      if (how === "lost" || how === "cord") picture.append(svg("rect", { class: "span lost", x: at(end) - 3, width: 4, y: i * tall + 1, height: tall - 2, rx: 1 }));
    }
  });
  $("lanes").replaceChildren(picture);
  $("lanes-note").textContent = generations.length > 1 ? `${generations.length} so far` : "";
  $("generations").replaceChildren(...generations.toReversed().map(each => make("li", {}, make("b", {}, String(each.generation)), make("span", {}, `${each.workers} worker${each.workers === 1 ? "" : "s"} · ${each.why}`), make("span", {}, `step ${count(each.step)} · ${clock(each.time)}`))));
}
