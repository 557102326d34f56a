// The page: follows the server's events, fetches curves of the selected runs, and sends the user's actions.

import { Chart, lineStyle } from "./chart.js";

const POINTS = 400;
const RETRY_MS = 2000;
const SELECTED_AT_FIRST = 50;
const TOKEN = "headwater-board-token";

const find = (id) => document.getElementById(id);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const CHARTS = [ // series, title, unit of its values
  ["loss", "Loss", 1],
  ["learning_rate", "Learning rate", 1],
  ["gradient_norm", "Gradient norm", 1],
  ["rate", "Tokens or samples per second", 1],
  ["memory", "Host memory in GiB", 2 ** 30],
];

const page = {
  runs: [], // rows as the server sent them
  selected: new Set(),
  known: new Set(), // runs that were seen before: the user's choice for them is kept
  places: new Map(), // name -> number of its line style
  curves: new Map(), // name -> curves with their version
  fetching: false,
  jobsError: null, // why the queue did not answer
  opened: null, // name of the run whose details are shown
};
const charts = new Map();

// Requests

function token() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(TOKEN, given);
    history.replaceState(null, "", location.pathname); // no token in bookmarks and pictures of the screen
  }
  return sessionStorage.getItem(TOKEN);
}

async function ask(path, options = {}) {
  const response = await fetch(`api/${path}`, { ...options, headers: { authorization: `Bearer ${token()}` } });
  if (response.status === 401) {
    showLogin("The token is missing or wrong.");
    throw new Error("unauthorized");
  }
  if (!response.ok) {
    const text = await response.text();
    let problem = text;
    try {
      problem = JSON.parse(text).error ?? text;
    } catch { /* a plain text */ }
    throw new Error(problem);
  }
  return response;
}

const send = (path, body) => ask(path, { method: "POST", body: JSON.stringify(body) }).then((answer) => answer.json());

function showLogin(problem) {
  sessionStorage.removeItem(TOKEN);
  find("login-problem").textContent = problem;
  find("login").hidden = false;
  find("content").hidden = true;
  find("status").textContent = "not connected";
  find("token").focus();
}

async function follow() {
  if (!token()) return showLogin("");
  try {
    const response = await ask("events");
    find("login").hidden = true;
    find("content").hidden = false;
    find("status").textContent = "live";
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      const last = events.findLast((event) => event.startsWith("data: "));
      if (last) update(JSON.parse(last.slice(6)));
    }
  } catch (error) {
    if (error.message === "unauthorized") return undefined;
  }
  find("status").textContent = "connection lost, trying again";
  return setTimeout(follow, RETRY_MS);
}

// Runs

function update(state) {
  find("folder").textContent = state.exists ? state.folder : `${state.folder}: the folder does not exist any more`;
  // By name, with numbers in their order: width_64 comes before width_128.
  page.runs = state.runs.toSorted((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
  const newest = [...state.runs].sort((one, other) => other.changed - one.changed).slice(0, SELECTED_AT_FIRST);
  const atFirst = new Set(newest.map((run) => run.name));
  for (const { name } of page.runs) {
    if (!page.places.has(name)) page.places.set(name, page.places.size);
    if (!page.known.has(name) && atFirst.has(name)) page.selected.add(name);
    page.known.add(name);
  }
  showRuns(state.now);
  showJobs(state.jobs);
  fetchCurves();
  if (page.opened && !state.runs.some((run) => run.name === page.opened)) closeDetails();
}

const shown = () => page.runs.filter((run) => run.name.includes(find("filter").value));

function age(seconds) {
  const units = [[86400, "d"], [3600, "h"], [60, "min"]];
  const [size, name] = units.find(([each]) => seconds >= each) ?? [1, "s"];
  return `${Math.max(0, Math.floor(seconds / size))} ${name} ago`;
}

function cell(row, name, content, tag = "td") {
  let found = row.querySelector(`[data-cell="${name}"]`);
  if (!found) {
    found = document.createElement(tag);
    found.dataset.cell = name;
    row.append(found);
  }
  if (typeof content === "string" && found.textContent !== content) found.textContent = content;
  return found;
}

/** Make the rows of a table body, and keep those that exist: the focus stays where it is. */
function keepRows(body, items, key) {
  const rows = new Map([...body.children].map((row) => [row.dataset.key, row]));
  items.forEach((item, place) => {
    const row = rows.get(key(item)) ?? document.createElement("tr");
    row.dataset.key = key(item);
    rows.delete(key(item));
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] ?? null);
  });
  for (const row of rows.values()) row.remove();
  return [...body.children];
}

function showRuns(now) {
  const runs = shown();
  find("no-runs").hidden = page.runs.length > 0;
  keepRows(find("run-rows"), runs, (run) => run.name).forEach((row, place) => showRun(row, runs[place], now));
}

function showRun(row, run, now) {
  const choice = cell(row, "show");
  if (!choice.firstChild) {
    const box = document.createElement("input");
    box.type = "checkbox";
    box.setAttribute("aria-label", `Show ${run.name} in the charts`);
    box.addEventListener("change", () => select(run.name, box.checked));
    const swatch = document.createElement("canvas");
    swatch.className = "swatch";
    [swatch.width, swatch.height] = [26, 10];
    swatch.setAttribute("aria-hidden", "true");
    choice.append(box, swatch);
  }
  choice.firstChild.checked = page.selected.has(run.name);
  drawSwatch(choice.lastChild, run.name);
  const name = cell(row, "name", undefined, "th");
  if (!name.firstChild) {
    name.scope = "row";
    const button = document.createElement("button");
    button.type = "button";
    button.className = "link";
    button.textContent = run.name;
    button.addEventListener("click", () => openDetails(run.name));
    const notices = document.createElement("p");
    notices.className = "notice";
    name.append(button, notices);
  }
  name.lastChild.textContent = run.notices.join("\n");
  const reading = run.read_share < 1 ? `, ${Math.floor(100 * run.read_share)} % read` : "";
  const since = now === undefined ? "" : `, ${age(now - run.changed)}`;
  cell(row, "state", `${run.state}${run.state === "complete" ? "" : since}${reading}`).className = run.state;
  cell(row, "step", run.step === null ? "none" : `${run.step}${run.end_step ? ` of ${run.end_step}` : ""}`);
  cell(row, "loss", run.loss === null ? "" : run.loss.toFixed(4));
  cell(row, "rate", run.rate === null ? "" : `${Math.round(run.rate).toLocaleString("en")} ${run.unit}/s`);
  cell(row, "memory", run.memory_text ?? "");
  cell(row, "eta", run.eta ?? "");
}

function drawSwatch(canvas, name) {
  const { color, dash } = lineStyle(page.places.get(name), dark.matches);
  if (canvas.dataset.drawn === color) return;
  canvas.dataset.drawn = color;
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, 26, 10);
  context.strokeStyle = color;
  context.lineWidth = 3;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(0, 5);
  context.lineTo(26, 5);
  context.stroke();
}

function select(name, chosen) {
  if (chosen) page.selected.add(name);
  else page.selected.delete(name);
  showCharts();
  fetchCurves();
}

function selectAll(chosen) {
  for (const { name } of shown()) {
    if (chosen) page.selected.add(name);
    else page.selected.delete(name);
  }
  showRuns();
  showCharts();
  fetchCurves();
}

// Charts

async function fetchCurves() {
  if (page.fetching) return;
  const old = page.runs.filter((run) => page.selected.has(run.name) && page.curves.get(run.name)?.version !== run.version);
  const gone = [...page.curves.keys()].filter((name) => !page.runs.some((run) => run.name === name));
  gone.forEach((name) => page.curves.delete(name));
  if (!old.length) {
    if (gone.length) showCharts();
    return;
  }
  page.fetching = true;
  const begin = performance.now();
  let whole = true;
  try {
    const names = old.map((run) => `run=${encodeURIComponent(run.name)}`).join("&");
    const found = await (await ask(`curves?points=${POINTS}&${names}`)).json();
    for (const [name, curves] of Object.entries(found)) page.curves.set(name, curves);
    showCharts();
    whole = old.every((run) => found[run.name]?.steps.length);
    if (whole) performance.mark("charts-shown"); // for measurements
  } catch {
    await new Promise((resolve) => { setTimeout(resolve, RETRY_MS); });
  }
  // A large folder that changes all the time must not keep the server and the browser busy.
  const pause = whole ? Math.max(300, 3 * (performance.now() - begin)) : 300;
  setTimeout(() => {
    page.fetching = false;
    fetchCurves(); // events that came in the meantime
  }, pause);
}

function showCharts() {
  for (const [series, , unit] of CHARTS) {
    const curves = [];
    for (const { name } of page.runs) {
      const found = page.curves.get(name);
      if (!page.selected.has(name) || !found?.series[series]) continue;
      const [low, high] = found.series[series].map((values) => values.map((value) => value && value / unit));
      const style = lineStyle(page.places.get(name), dark.matches);
      curves.push({ name, ...style, steps: found.steps, low, high, marks: series === "loss" ? found.validation : [] });
    }
    charts.get(series).show(curves);
  }
}

// Details of a run

function part(title, element) {
  const heading = document.createElement("h3");
  heading.textContent = title;
  find("details-content").append(heading, element);
}

function textBlock(text, label) {
  const block = document.createElement("pre");
  block.tabIndex = 0;
  block.setAttribute("role", "region");
  block.setAttribute("aria-label", label);
  block.textContent = text;
  return block;
}

function table(titles, rows) {
  const element = document.createElement("table");
  const head = element.createTHead().insertRow();
  for (const title of titles) {
    const field = document.createElement("th");
    field.scope = "col";
    field.textContent = title;
    head.append(field);
  }
  const body = element.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const value of row) line.insertCell().textContent = value;
  }
  return element;
}

async function openDetails(name) {
  const details = await (await ask(`details?run=${encodeURIComponent(name)}`)).json();
  page.opened = name;
  find("details-title").textContent = `Run ${name}`;
  find("details-content").replaceChildren();
  find("details").hidden = false;
  if (details.validations.length) {
    const metrics = [...new Set(details.validations.flatMap((row) => Object.keys(row.metrics)))];
    const rows = details.validations.map((row) => [row.step, row.loader, row.loss, ...metrics.map((key) => row.metrics[key] ?? "")]);
    part("Evaluations", table(["Step", "Data set", "Loss", ...metrics], rows));
  }
  if (details.has_timeline) await showTimeline(name);
  if (details.samples.length) {
    const rows = details.samples.map((sample) => [sample.prompt, sample.text]);
    part(`Samples of ${details.samples[0].source}`, table(["Prompt", "Generated text"], rows));
  }
  if (details.plan) part("Plan", textBlock(details.plan, "Plan"));
  for (const log of details.logs.slice(-1)) {
    const answer = await ask(`log?run=${encodeURIComponent(name)}&log=${encodeURIComponent(log)}`);
    const block = textBlock(await answer.text(), `Log ${log}`);
    part(`End of the log ${log}`, block);
    block.scrollTop = block.scrollHeight;
  }
  if (!find("details-content").children.length) part("Nothing else yet", document.createElement("p"));
  find("close-details").focus();
  find("details").scrollIntoView({ block: "nearest" });
}

async function showTimeline(name) {
  const picture = document.createElement("img");
  picture.alt = "Timeline of the last profiled step: what each thread did, predicted and measured";
  picture.src = URL.createObjectURL(await (await ask(`timeline?run=${encodeURIComponent(name)}`)).blob());
  part("Timeline of the last profiled step", picture);
}

function closeDetails() {
  const name = page.opened;
  page.opened = null;
  find("details").hidden = true;
  find("details-content").replaceChildren();
  find("run-rows").querySelector(`[data-key="${CSS.escape(name ?? "")}"] button`)?.focus();
}

// Jobs

function showJobs(jobs) {
  find("jobs").hidden = jobs === null;
  if (jobs === null) return;
  const problem = find("jobs-problem");
  if (jobs.error) {
    problem.textContent = page.jobsError = jobs.error;
    return;
  }
  // The queue answers again. The error of an action stays until the next action.
  if (problem.textContent === page.jobsError) problem.textContent = "";
  page.jobsError = null;
  keepRows(find("job-rows"), jobs.rows, (job) => job.name).forEach((row, place) => showJob(row, jobs.rows[place]));
}

function showJob(row, job) {
  cell(row, "name", job.name, "th").scope = "row";
  cell(row, "user", job.user);
  cell(row, "phase", job.phase);
  const priority = cell(row, "priority");
  if (!job.can_prioritize) cell(row, "priority", job.priority);
  else if (!priority.querySelector("select")) priority.replaceChildren(prioritySelect(job));
  else if (document.activeElement !== priority.firstChild) priority.firstChild.value = job.priority;
  cell(row, "csx", String(job.num_csx));
  cell(row, "command", job.command).className = "command";
  cell(row, "reason", job.reason ?? "");
  const action = cell(row, "action");
  if (!job.can_cancel) action.replaceChildren();
  else if (!action.firstChild) action.append(cancelButton(job));
}

function prioritySelect(job) {
  const choice = document.createElement("select");
  choice.setAttribute("aria-label", `Priority of ${job.name}`);
  for (const value of ["p1", "p2", "p3"]) choice.add(new Option(value, value, false, value === job.priority));
  choice.addEventListener("change", () => act("jobs/priority", { name: job.name, priority: choice.value }));
  return choice;
}

function cancelButton(job) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Cancel";
  button.setAttribute("aria-label", `Cancel ${job.name}`);
  button.addEventListener("click", () => {
    if (window.confirm(`Cancel ${job.name}? A training run ends its step and writes a checkpoint.`)) {
      act("jobs/cancel", { name: job.name });
    }
  });
  return button;
}

async function act(path, body) {
  try {
    showJobs(await send(path, body));
    find("jobs-problem").textContent = "";
  } catch (error) {
    find("jobs-problem").textContent = error.message;
  }
}

// Start

for (const [series, title] of CHARTS) {
  const chart = new Chart(title, (text) => { find("readout").textContent = text; });
  charts.set(series, chart);
  find("chart-grid").append(chart.element);
}
find("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, find("token").value);
  follow();
});
find("filter").addEventListener("input", () => showRuns());
find("all").addEventListener("click", () => selectAll(true));
find("none").addEventListener("click", () => selectAll(false));
find("close-details").addEventListener("click", closeDetails);
find("details").addEventListener("keydown", (event) => { if (event.key === "Escape") closeDetails(); });
find("log-scale").addEventListener("change", (event) => {
  charts.get("loss").logarithmic = event.target.checked;
  charts.get("loss").draw();
});
dark.addEventListener("change", () => { showRuns(); showCharts(); });
follow();
