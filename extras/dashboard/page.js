"use strict";
// Text of others (names, roots, causes) reaches the page by textContent alone, never as markup.
const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const SILENT_S = 60;

function node(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = String(text);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
function drawn(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function table(caption, heads, rows) {
  const made = node("table");
  made.append(node("caption", caption, { class: "note" }));
  const head = node("tr");
  for (const one of heads) head.append(node("th", one, { scope: "col" }));
  made.append(head);
  for (const row of rows) {
    const line = node("tr");
    for (const cell of row) line.append(node("td", cell));
    made.append(line);
  }
  const around = node("div", null, { class: "scroll", tabindex: "0", role: "region", "aria-label": caption });
  around.append(made);
  return around;
}
function bytes(count) {
  let unit = 0;
  while (count >= 1000 && unit < 4) { count /= 1000; unit += 1; }
  return `${unit ? count.toFixed(1) : count} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}
function span(seconds) {
  if (seconds < 120) return `${Math.max(0, seconds).toFixed(0)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(0)} d`;
}
const when = (seconds) => new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";
const share = (value) => (value === null || value === undefined ? "not known" : `${(100 * value).toFixed(1)} %`);
const known = (pair) => (pair ? `${pair[1]}.g${pair[0]}` : "none");

function tiles(found) {
  const sum = found.summary, job = found.job, last = found.sessions.at(-1);
  const step = job && job.step !== null ? job.step : last ? last.step : -1;
  const shown = {
    Step: step < 0 ? "none" : step,
    "On storage": known(job && job.committed ? job.committed : last && last.committed),
    Goodput: share(sum.goodput),
    Restarts: sum.restarts,
    "Steps lost": sum.steps_lost,
    "Time down": span(sum.down_s),
    Sessions: sum.sessions,
  };
  if (job) Object.assign(shown, { "In memory": known(job.snapshot), Suspect: job.suspect.map(known).join(" ") || "none", Memory: bytes(job.nbytes) });
  const parts = Object.entries(shown).map(([name, value]) => {
    const part = node("div");
    part.append(node("dt", name), node("dd", value));
    return part;
  });
  at("tiles").replaceChildren(...parts);
}

function state(found) {
  const last = found.sessions.at(-1), job = found.job;
  if (job && job.alive) return `running, generation ${job.generation ?? "not known"}`;
  if (job && job.daemon_alive) return "no rank is running; what is in memory is being persisted";
  if (!last) return "the root remembers no session";
  const ends = { ended: "ended", stopped: "stopped", "": "last seen" };
  return `${ends[last.end] ?? last.end} at step ${Math.max(0, last.step)}, ${when(last.updated_s)}`;
}

// What each session but the first began with: where it went back to, and how far the one before had come.
function breaks(found) {
  return found.sessions.slice(1).map((one, k) => ({
    from: Math.max(0, one.restored_step), to: Math.max(0, found.sessions[k].step),
    why: one.failure?.cause ?? (found.sessions[k].end === "ended" ? "started again after a clean end" : "rollback, or a cause that nobody recorded"),
  }));
}
const COURSE = "job/";
function curves(found) {
  const names = [...new Set(found.curves.flatMap((one) => Object.keys(one.points)))];
  const drawnOnes = (wanted, short) => wanted.flatMap((name) => {
    const lines = found.curves.map((one) => (one.points[name] ?? []).filter((point) => Number.isFinite(point[1])));
    return [node("h3", short(name)), chart(name, lines, breaks(found))];
  });
  const mine = drawnOnes(names.filter((name) => !name.startsWith(COURSE)), (name) => name);
  const course = drawnOnes(names.filter((name) => name.startsWith(COURSE)).sort(), (name) => name.slice(COURSE.length));
  at("curves").replaceChildren(...(mine.length ? mine : [node("p", "Nothing was logged: ckpt.log(name, value) does.")]));
  at("course").replaceChildren(...(course.length ? course : [node("p", "Nothing is known yet: the persister notes it once a minute and at commits.")]));
}
const short = (value) => (value === 0 ? "0" : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(3)));
function ticks(low, high, count = 4) {
  const rough = (high - low) / count || 1, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * unit).find((one) => one >= rough);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high && found.length < 12; k += 1) found.push(k * step);
  return found;
}
function chart(name, lines, restarts) {
  const all = lines.flat();
  if (!all.length) return node("p", "no finite value");
  const least = (list) => list.reduce((a, b) => Math.min(a, b)), most = (list) => list.reduce((a, b) => Math.max(a, b));
  const steps = all.map((point) => point[0]), values = all.map((point) => point[1]);
  const [x0, x1, y0, y1] = [least(steps), most(steps), least(values), most(values)];
  const x = (step) => 60 + ((step - x0) / (x1 - x0 || 1)) * 830, y = (value) => 180 - (y1 === y0 ? 0.5 : (value - y0) / (y1 - y0)) * 165;
  const label = `${name}: ${all.length} points, steps ${x0} to ${x1}, from ${values[0].toPrecision(4)} to ${values.at(-1).toPrecision(4)}, ${restarts.length} restarts`;
  const picture = drawn("svg", { viewBox: "0 0 900 205", role: "img", "aria-label": label });
  for (const one of restarts) {
    if (one.to > one.from && one.to >= x0 && one.from <= x1) {
      const left = x(Math.max(one.from, x0));
      picture.append(drawn("rect", { class: "lost", x: left.toFixed(1), y: 10, width: Math.max(1, x(Math.min(one.to, x1)) - left).toFixed(1), height: 170 }));
    }
  }
  for (const value of y0 === y1 ? [y0] : ticks(y0, y1)) {
    picture.append(drawn("path", { class: "grid", d: `M60 ${y(value).toFixed(1)}H890` }), drawn("text", { x: 54, y: (y(value) + 4).toFixed(1), "text-anchor": "end" }, short(value)));
  }
  picture.append(drawn("path", { class: "axis", d: "M60 10V180H890" }));
  for (const step of x0 === x1 ? [x0] : ticks(x0, x1, 8).filter(Number.isInteger)) {
    picture.append(drawn("text", { x: x(step).toFixed(1), y: 196, "text-anchor": "middle" }, `${step}`));
  }
  lines.forEach((line, number) => {
    const d = line.map((point, k) => `${k ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`).join("");
    const kind = number < lines.length - 1 ? "curve before" : "curve";
    if (line.length === 1) picture.append(drawn("circle", { class: "dot", cx: x(line[0][0]).toFixed(1), cy: y(line[0][1]).toFixed(1), r: 3 }));
    else if (d) picture.append(drawn("path", { class: kind, d }));
  });
  for (const one of restarts) {
    if (one.from < x0 || one.from > x1) continue;
    const mark = drawn("path", { class: "restart", d: `M${x(one.from).toFixed(1)} 10V180` });
    mark.append(drawn("title", {}, `back to step ${one.from} from ${one.to}: ${one.why}`));
    picture.append(mark);
  }
  return picture;
}

function losses(found) {
  const sum = found.summary, whole = sum.elapsed_s;
  if (!whole) { at("losses").replaceChildren(node("p", "no time has passed yet")); return; }
  const parts = [["down", "bad", "Down: failures, restarts and starts", sum.down_s], ["again", "warn", "Steps trained again", sum.lost_s],
    ["stall", "old", "Training that waited for snapshots", sum.stall_s]];
  const kept = Math.max(0, whole - parts.reduce((total, one) => total + one[3], 0));
  parts.unshift(["kept", "good", "Training that stayed", kept]);
  const picture = drawn("svg", { viewBox: "0 0 900 34", role: "img", "aria-label": parts.map((one) => `${one[2]}: ${share(one[3] / whole)}`).join("; ") });
  let left = 0;
  for (const [, kind, name, seconds] of parts) {
    const width = (seconds / whole) * 900, part = drawn("rect", { class: `part ${kind}`, x: left, y: 4, width, height: 26 });
    part.append(drawn("title", {}, `${name}: ${span(seconds)}`));
    picture.append(part);
    left += width;
  }
  const rows = parts.map(([, , name, seconds]) => [name, span(seconds), share(seconds / whole)]);
  for (const [cause, seconds] of Object.entries(sum.down_by_cause).sort((a, b) => b[1] - a[1]).slice(0, 8)) {
    rows.splice(2, 0, [`– by ${cause} (${sum.restarts_by_cause[cause]}x)`, span(seconds), share(seconds / whole)]);
  }
  at("losses").replaceChildren(picture, table(`Of ${span(whole)} since the first session began`, ["What", "Time", "Share"], rows));
}

function plan(found) {
  const planned = found.plan, sum = found.summary;
  at("plan-section").hidden = !planned.intervals;
  if (!planned.intervals) return;
  const part = (value) => (sum.elapsed_s ? share(value / sum.elapsed_s) : "not known"), per = (value, count) => (count ? span(value / count) : "none yet");
  const { intervals, costs } = planned;
  at("plan").replaceChildren(table("What flashckpt plan expected, and what this job has shown so far", ["", "Plan", "Happened"], [
    ["Goodput", share(intervals.goodput), share(sum.goodput)],
    ["Between two failures", span(planned.mtbf_s), per(sum.elapsed_s, sum.restarts)],
    ["A restart from memory, to its first step", span(costs.restart_memory_s), per(sum.down_s, sum.restarts)],
    ["Share of restarts", share(intervals.restart), part(sum.down_s)],
    ["Share of steps trained again", share(intervals.recompute), part(sum.lost_s)],
    ["Share of waiting for snapshots", share(intervals.stall), part(sum.stall_s)],
    ["A snapshot holds training for", `${(1e3 * costs.stall_s).toFixed(1)} ms`, sum.snapshots ? `${((1e3 * sum.stall_s) / sum.snapshots).toFixed(1)} ms` : "none yet"],
  ]));
}

const seen = [];  // since this page was opened: what is in memory and with partners
function look(found) {
  const job = found.job, now = { at: found.now_s, memory: known(job?.snapshot), partners: known(job?.replicas?.replicated) };
  const before = seen.at(-1);
  if (job && (!before || before.memory !== now.memory || before.partners !== now.partners)) seen.push(now);
  if (seen.length > 2000) seen.splice(0, 1000);
}
function sessions(found) {
  const all = found.sessions;
  if (!all.length) { at("timeline").replaceChildren(); at("sessions").replaceChildren(node("p", "none yet")); return; }
  const t0 = all[0].begun_s, t1 = Math.max(...all.map((one) => one.updated_s), seen.at(-1)?.at ?? 0, t0 + 1);
  const x = (time) => 110 + Math.max(0, Math.min(1, (time - t0) / (t1 - t0))) * 780;
  const lanes = [["sessions", 0], ["down", 1], ["on storage", 2], ["incidents", 3], ...(seen.length ? [["in memory", 4]] : []), ...(seen.some((one) => one.partners !== "none") ? [["replicated", 5]] : [])];
  const height = 30 + lanes.length * 24;
  const label = `${all.length} sessions, ${found.checkpoints.length} checkpoints and ${found.incidents.length} incidents from ${when(t0)} to ${when(t1)}`;
  const picture = drawn("svg", { viewBox: `0 0 900 ${height}`, role: "img", "aria-label": label });
  for (const [name, lane] of lanes) {
    picture.append(drawn("text", { x: 4, y: lane * 24 + 19 }, name), drawn("path", { class: "grid", d: `M110 ${lane * 24 + 27}H890` }));
  }
  const put = (tag, attributes, title) => {
    const made = drawn(tag, attributes);
    made.append(drawn("title", {}, title));
    picture.append(made);
  };
  const dot = (time, lane, kind, title) => { if (time >= t0 && time <= t1) put("circle", { class: kind, cx: x(time).toFixed(1), cy: lane * 24 + 15, r: 4 }, title); };
  all.forEach((one, k) => {
    put("rect", { class: `bar ${one.end === "ended" || one.end === "stopped" ? one.end : ""}`, x: x(one.begun_s), y: 6, width: Math.max(2, x(one.updated_s) - x(one.begun_s)), height: 17, rx: 3 },
      `generation ${one.generation}: ${span(one.updated_s - one.begun_s)}, to step ${one.step}`);
    const before = all[k - 1];
    if (before && before.end !== "ended") {
      const until = one.begun_s + one.first_step_s;
      put("rect", { class: "part bad", x: x(before.updated_s), y: 30, width: Math.max(2, x(until) - x(before.updated_s)), height: 17, rx: 3 }, `down for ${span(until - before.updated_s)}: ${one.failure?.cause ?? "no cause is recorded"}`);
    }
  });
  for (const one of found.checkpoints) dot(one.created_s, 2, "bar", `step ${one.step}, ${bytes(one.nbytes)}, ${one.state}`);
  for (const one of found.incidents) dot(Date.parse(one.time) / 1000, 3, "part bad", one.verdict);
  for (const one of seen) {
    if (one.memory !== "none") dot(one.at, 4, "bar ended", `snapshot ${one.memory} was in memory`);
    if (one.partners !== "none") dot(one.at, 5, "bar ended", `snapshot ${one.partners} was with the partners`);
  }
  picture.append(drawn("text", { x: 110, y: height - 6 }, when(t0)), drawn("text", { x: 890, y: height - 6, "text-anchor": "end" }, when(t1)));
  at("timeline").replaceChildren(picture);
  const rows = all.map((one) => [one.generation, when(one.begun_s), span(one.updated_s - one.begun_s), one.world_size, one.host,
    one.restored_step < 0 ? "" : one.restored_step, one.step < 0 ? "" : one.step, one.end || "running or not seen to end"]);
  at("sessions").replaceChildren(
    table("Sessions, newest first", ["Generation", "Began", "Ran", "Ranks", "Host", "From step", "To step", "End"], rows.reverse()));
}

let chosen = -1, newest = null;
const STATE = "state", STEPS = [0.8, 1.1, 1.3, 1.6, 2.5];
function word(one, last) {
  if (one.has_ended) return "ended";
  if (one.is_paused) return "paused";
  if (one.slow) return "slow";
  if (one.silent_s > SILENT_S) return "silent";
  return one.silent_s !== undefined && one.step < last ? "late" : "on time";
}
function median(list) {
  const sorted = list.filter(Number.isFinite).sort((a, b) => a - b);
  return sorted[(sorted.length - 1) >> 1] ?? 0;
}
function ranks(found) {
  newest = found;
  const all = found.ranks, last = all.reduce((step, one) => (one.silent_s === undefined ? step : Math.max(step, one.step)), -1);
  const phases = [...new Set(all.flatMap((one) => Object.keys(one.seconds)))];
  if (at("by").length !== phases.length + 1) {
    const before = at("by").value;
    at("by").replaceChildren(...[STATE, ...phases].map((name) => node("option", name, { value: name })));
    if (phases.includes(before)) at("by").value = before;
  }
  const by = at("by").value || STATE, middle = median(all.map((one) => one.seconds[by] ?? NaN));
  const counts = {}, groups = new Map();
  all.forEach((one, number) => {
    const kind = word(one, last), ratio = middle ? (one.seconds[by] ?? NaN) / middle : NaN;
    counts[kind] = (counts[kind] ?? 0) + 1;
    const spent = by === STATE ? "" : Number.isFinite(ratio) ? `, ${by} ${ms(one.seconds[by])} of each step, ${ratio.toFixed(2)} times the median` : `, ${by} not known`;
    const sign = one.silent_s === undefined ? "" : `, last sign ${one.silent_s === null ? "never" : `${one.silent_s} s ago`}`;
    const label = `rank ${one.rank}${one.host ? ` on ${one.host}` : ""}: ${kind}${one.slow ? ` in ${one.slow}` : ""}, step ${one.step}${sign}, pid ${one.pid}${spent}`;
    const level = STEPS.filter((step) => ratio > step).length;
    const mark = by === STATE ? { silent: "!", late: "-", ended: "x", paused: "=", slow: "s" }[kind] ?? "" : level > 2 ? "+" : "";
    const style = by === STATE ? kind.replace("on time", "") : Number.isFinite(ratio) ? `heat${level}` : "ended";
    const cell = node("div", mark, { class: `rank ${style}`, role: "option", id: `rank-${number}`, title: label, "aria-label": label });
    cell.addEventListener("click", () => choose(number));
    const place = one.node < 0 ? "this machine" : `node ${one.node} ${one.host}`;
    if (!groups.has(place)) groups.set(place, []);
    groups.get(place).push(cell);
  });
  const parts = [...groups].map(([place, cells]) => {
    const part = node("div", null, { class: "node", role: "group", "aria-label": place });
    const inside = node("div", null, { class: "cells" });
    inside.append(...cells);
    part.append(node("span", place, { class: "note" }), inside);
    return part;
  });
  at("ranks").replaceChildren(...parts);
  at("legend").replaceChildren(...(by === STATE ? [] : ["less", "as the median", "", "1.3 times (+)", "", "2.5 times and more"].flatMap((text, level) => [node("span", " ", { class: `rank inline heat${level}` }), node("span", `${text} `)])));
  const words = Object.entries(counts).map(([kind, count]) => `${count} ${kind}`).join(", ");
  at("rank-note").textContent = all.length ? `${all.length} ranks on ${groups.size} node${groups.size === 1 ? "" : "s"}: ${words}. Arrow keys choose a rank.` : "No rank is known: dlrun's first agent tells of all of them, and this machine's memory of its own.";
  if (chosen >= 0 && chosen < all.length) choose(chosen, false);
}
const ms = (seconds) => (seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1e3 * seconds).toFixed(1)} ms`);
function choose(number, isSaid = true) {
  const cells = at("ranks").querySelectorAll(".rank");
  if (!cells.length) return;
  cells[chosen]?.classList.remove("chosen");
  chosen = Math.max(0, Math.min(cells.length - 1, number));
  cells[chosen].classList.add("chosen");
  at("ranks").setAttribute("aria-activedescendant", `rank-${chosen}`);
  if (!isSaid) return;
  cells[chosen].scrollIntoView({ block: "nearest" });
  const one = newest.ranks[chosen], others = newest.ranks;
  const spent = Object.entries(one.seconds).map(([name, seconds]) => `${name} ${ms(seconds)} (median ${ms(median(others.map((other) => other.seconds[name] ?? NaN)))})`);
  at("rank").textContent = [cells[chosen].getAttribute("aria-label"), ...spent].join("; ");
}
at("ranks").addEventListener("keydown", (event) => {
  const sizes = [...at("ranks").children].map((part) => part.querySelectorAll(".rank").length);
  let k = 0, left = Math.max(chosen, 0);
  while (k < sizes.length - 1 && left >= sizes[k]) { left -= sizes[k]; k += 1; }
  const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: sizes[k], ArrowUp: -(sizes[k - 1] ?? 0), Home: -chosen, End: newest.ranks.length }[event.key];
  if (move !== undefined) { event.preventDefault(); choose(chosen + move); }
});
at("by").addEventListener("change", () => ranks(newest));

function incidents(found) {
  const rows = found.sessions.flatMap((one) => [one.failure, one.ended_by].filter((what) => what && what.cause).map((what) =>
    [what.time ?? "", what.rank < 0 ? "" : what.rank ?? "", what.host ?? "", what.step ?? "", what.cause, what.outcome ?? "", what.total_s > 0 ? `${what.total_s} s` : ""]));
  const open = new Set([...at("incidents").querySelectorAll("details[open]")].map((one) => one.id));
  const verdicts = found.incidents.map((one) => {
    const part = node("details", null, { id: `incident-${one.id}` });
    part.open = open.has(part.id);
    part.append(node("summary", `${one.time.slice(0, 19).replace("T", " ")}  ${one.verdict}`), node("pre", one.report));
    return part;
  }).reverse();
  at("incidents").replaceChildren(...verdicts, ...(rows.length
    ? [table("What failures cost, newest first", ["Time", "Rank", "Host", "Step", "Cause", "Then", "To the next step"], rows.reverse())]
    : verdicts.length ? [] : [node("p", "None is recorded; dlrun writes them.")]));
}

const drawnOf = {};
function ifChanged(name, value, draw) {  // what has not changed keeps its focus and its place
  const text = JSON.stringify(value);
  if (drawnOf[name] !== text) { drawnOf[name] = text; draw(); }
}

function show(found) {
  document.title = `${state(found).split(",")[0]}: ${found.root}`;
  at("root").textContent = found.root;
  at("state").textContent = state(found);
  at("error").textContent = [found.error, found.job?.error?.split("\n")[0]].filter(Boolean).join("; ");
  look(found);
  tiles(found);
  ifChanged("ranks", found.ranks, () => ranks(found));
  ifChanged("losses", [found.summary, found.plan], () => { losses(found); plan(found); });
  ifChanged("curves", [found.curves, breaks(found)], () => curves(found));
  ifChanged("sessions", [found.sessions, found.checkpoints, found.incidents, seen.length], () => sessions(found));
  ifChanged("incidents", [found.sessions.map((one) => [one.failure, one.ended_by]), found.incidents], () => incidents(found));
  ifChanged("checkpoints", found.checkpoints, () => at("checkpoints").replaceChildren(table("Checkpoints, newest first", ["Step", "Generation", "Committed", "Size", "State", "Kept by"],
    found.checkpoints.map((one) => [one.step, one.generation, when(one.created_s), bytes(one.nbytes), one.state, one.kept]))));
}

const first = JSON.parse(at("data").textContent);
show(first);
if (first.events) {
  const source = new EventSource(first.events);
  source.onmessage = (event) => show(JSON.parse(event.data));
  source.onerror = () => { at("error").textContent = "not live: flashckpt dashboard has ended, or cannot be reached"; };
}
