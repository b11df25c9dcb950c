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

function curves(found) {
  const names = new Set(found.curves.flatMap((one) => Object.keys(one.points)));
  const parts = [];
  for (const name of names) {
    const lines = found.curves.map((one) => (one.points[name] ?? []).filter((point) => Number.isFinite(point[1])));
    parts.push(node("h3", name), chart(name, lines, found.sessions.slice(1).map((one) => one.restored_step)));
  }
  at("curves").replaceChildren(...(parts.length ? parts : [node("p", "Nothing was logged: ckpt.log(name, value) does.")]));
}
function chart(name, lines, restarts) {
  const all = lines.flat();
  if (!all.length) return node("p", "no finite value");
  const steps = all.map((point) => point[0]), values = all.map((point) => point[1]);
  const least = (list) => list.reduce((a, b) => Math.min(a, b)), most = (list) => list.reduce((a, b) => Math.max(a, b));
  const [x0, x1, y0, y1] = [least(steps), most(steps), least(values), most(values)];
  const x = (step) => 60 + ((step - x0) / (x1 - x0 || 1)) * 830, y = (value) => 180 - ((value - y0) / (y1 - y0 || 1)) * 165;
  const label = `${name}: ${all.length} points, steps ${x0} to ${x1}, from ${values[0].toPrecision(4)} to ${values.at(-1).toPrecision(4)}`;
  const picture = drawn("svg", { viewBox: "0 0 900 205", role: "img", "aria-label": label });
  picture.append(drawn("path", { class: "axis", d: "M60 10V180H890" }));
  picture.append(drawn("text", { x: 2, y: 20 }, y1.toPrecision(4)), drawn("text", { x: 2, y: 180 }, y0.toPrecision(4)));
  picture.append(drawn("text", { x: 60, y: 198 }, `step ${x0}`));
  picture.append(drawn("text", { x: 890, y: 198, "text-anchor": "end" }, `step ${x1}`));
  lines.forEach((line, number) => {
    const d = line.map((point, k) => `${k ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`).join("");
    if (d) picture.append(drawn("path", { class: number < lines.length - 1 ? "curve before" : "curve", d }));
  });
  for (const step of restarts) {
    if (step >= x0 && step <= x1) picture.append(drawn("path", { class: "restart", d: `M${x(step).toFixed(1)} 10V180` }));
  }
  return picture;
}

function sessions(found) {
  const all = found.sessions;
  if (!all.length) { at("timeline").replaceChildren(); at("sessions").replaceChildren(node("p", "none yet")); return; }
  const t0 = all[0].begun_s, t1 = Math.max(...all.map((one) => one.updated_s), t0 + 1);
  const label = `${all.length} sessions from ${when(t0)} to ${when(t1)}`;
  const picture = drawn("svg", { viewBox: "0 0 900 44", role: "img", "aria-label": label });
  for (const one of all) {
    const x = ((one.begun_s - t0) / (t1 - t0)) * 890, width = Math.max(2, ((one.updated_s - one.begun_s) / (t1 - t0)) * 890);
    const bar = drawn("rect", { class: `bar ${one.end === "ended" || one.end === "stopped" ? one.end : ""}`, x, y: 4, width, height: 18, rx: 3 });
    bar.append(drawn("title", {}, `generation ${one.generation}: ${span(one.updated_s - one.begun_s)}, to step ${one.step}`));
    picture.append(bar);
  }
  for (const one of found.checkpoints) {
    if (one.created_s >= t0 && one.created_s <= t1) {
      picture.append(drawn("circle", { class: "bar", cx: ((one.created_s - t0) / (t1 - t0)) * 890, cy: 34, r: 3 }));
    }
  }
  at("timeline").replaceChildren(picture, node("p", "Bars are sessions, dots are checkpoints.", { class: "note" }));
  const rows = all.map((one) => [one.generation, when(one.begun_s), span(one.updated_s - one.begun_s), one.world_size, one.host,
    one.restored_step < 0 ? "" : one.restored_step, one.step < 0 ? "" : one.step, one.end || "running or not seen to end"]);
  at("sessions").replaceChildren(
    table("Sessions, newest first", ["Generation", "Began", "Ran", "Ranks", "Host", "From step", "To step", "End"], rows.reverse()));
}

let chosen = -1;
function ranks(found) {
  const all = found.ranks, newest = all.reduce((step, one) => Math.max(step, one.step), -1);
  const word = (one) => one.has_ended ? "ended" : one.is_paused ? "paused" :
    one.silent_s !== null && one.silent_s > SILENT_S ? "silent" : one.step < newest ? "late" : "on time";
  const counts = {};
  const cells = all.map((one, number) => {
    const kind = word(one);
    counts[kind] = (counts[kind] ?? 0) + 1;
    const label = `rank ${one.rank}: ${kind}, step ${one.step}, last sign ${one.silent_s === null ? "never" : `${one.silent_s} s ago`}, pid ${one.pid}`;
    const mark = { silent: "!", late: "-", ended: "x", paused: "=" }[kind] ?? "";
    const cell = node("div", mark, { class: `rank ${kind.replace("on time", "")}`, role: "option", id: `rank-${number}`, title: label, "aria-label": label });
    cell.addEventListener("click", () => choose(number));
    return cell;
  });
  at("ranks").replaceChildren(...cells);
  const words = Object.entries(counts).map(([kind, count]) => `${count} ${kind}`).join(", ");
  at("rank-note").textContent = all.length ? `${all.length} ranks: ${words}. Arrow keys choose one.` : "This machine's memory holds no rank of the job.";
  if (chosen >= 0 && chosen < all.length) choose(chosen, false);
}
function choose(number, isSaid = true) {
  const cells = at("ranks").children;
  if (!cells.length) return;
  cells[chosen]?.classList.remove("chosen");
  chosen = Math.max(0, Math.min(cells.length - 1, number));
  cells[chosen].classList.add("chosen");
  cells[chosen].scrollIntoView({ block: "nearest" });
  at("ranks").setAttribute("aria-activedescendant", `rank-${chosen}`);
  if (isSaid) at("rank").textContent = cells[chosen].getAttribute("aria-label");
}
at("ranks").addEventListener("keydown", (event) => {
  const across = Math.max(1, getComputedStyle(at("ranks")).gridTemplateColumns.split(" ").length);
  const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across }[event.key];
  if (move) { event.preventDefault(); choose(chosen + move); }
});

function incidents(found) {
  const rows = found.sessions.flatMap((one) => [one.failure, one.ended_by].filter((what) => what && what.cause).map((what) =>
    [what.time ?? "", what.rank ?? "", what.host ?? "", what.step ?? "", what.cause, what.outcome ?? "", what.total_s > 0 ? `${what.total_s} s` : ""]));
  const verdicts = found.incidents.map((one) => [one.time.slice(0, 19), one.verdict, one.reason,
    one.others.map((group) => `${group.count} in ${group.doing}`).join(", "), one.findings.join("; ")]).reverse();
  at("incidents").replaceChildren(...(verdicts.length
    ? [table("Verdicts, newest first", ["Time", "Verdict", "Why", "The other ranks", "Also"], verdicts)] : []), rows.length
    ? table("Failures, newest first", ["Time", "Rank", "Host", "Step", "Cause", "Then", "To the next step"], rows.reverse())
    : node("p", "None is recorded; dlrun writes them."));
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
  tiles(found);
  ranks(found);
  ifChanged("curves", [found.curves, found.sessions.map((one) => one.restored_step)], () => curves(found));
  ifChanged("sessions", [found.sessions, found.checkpoints, found.incidents], () => { sessions(found); incidents(found); });
  ifChanged("checkpoints", found.checkpoints, () => at("checkpoints").replaceChildren(table("Checkpoints, newest first", ["Step", "Generation", "Committed", "Size", "State", "Kept by a mark"],
    found.checkpoints.map((one) => [one.step, one.generation, when(one.created_s), bytes(one.nbytes), one.state, one.kept ? "yes" : ""]))));
}

const first = JSON.parse(at("data").textContent);
show(first);
if (first.events) {
  const source = new EventSource(first.events);
  source.onmessage = (event) => show(JSON.parse(event.data));
  source.onerror = () => { at("error").textContent = "not live: flashckpt dashboard has ended, or cannot be reached"; };
}
