// The viewer of runs: views by the address after "#", answers of the server as text, never as HTML,
// except charts and tables, which the server's templates have escaped.
"use strict";

const POLL_MS = 3000;
const SHADES = [-0.1, -0.5, -1.0, -2.0, -4.0]; // as the report's, in nats
const content = document.getElementById("content");
const status = document.getElementById("status");
let visit = 0; // counts views, so that an answer for one that was left is dropped
let timer = 0;

// Elements: el("a.soft", { href: "#/" }, "text", ...children)
function el(what, given, ...children) {
  const [tag, ...classes] = what.split(".");
  const made = document.createElement(tag);
  made.className = classes.join(" ");
  for (const [name, value] of Object.entries(given || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((one) => one !== null && one !== undefined).map((one) => (one instanceof Node ? one : visible(one))));
  return made;
}

// Control characters and those that change the direction of text, as the report shows them.
function visible(value) {
  return String(value).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (one) => {
    if (one === "\n" || one === "\t") return one;
    const code = one.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  });
}

function number(value, digits = 4) {
  if (typeof value !== "number") return "–";
  const text = Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(digits)).toString();
  return text.replace("-", "−");
}

function signed(value) {
  return (value > 0 ? "+" : "") + number(value);
}

function address(view, values) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values || {})) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined) query.append(name, one);
    }
  }
  const text = query.toString();
  return `#/${view}${text ? "?" + text : ""}`;
}

async function ask(name, values) {
  const answer = await fetch(`api/${address(name, values).slice(2)}`);
  const said = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(said.error);
  return said;
}

function show(title, crumbs, ...children) {
  document.title = `${visible(title)} - Isobit`;
  const trail = [el("a", { href: "#/" }, "Runs"), ...crumbs.map(([text, href]) => (href ? el("a", { href }, text) : el("span", { "aria-current": "page" }, text)))];
  document.getElementById("crumbs").replaceChildren(...trail);
  content.replaceChildren(...children);
}

function say(text, isLive) {
  status.className = isLive ? "soft live" : "soft";
  if (status.textContent !== text) status.textContent = text;
}

function problem(error) {
  const gone = error instanceof TypeError;
  say(gone ? "isobit ui does not answer; is it still running?" : "", false);
  if (!gone) content.replaceChildren(el("p.card.error", { role: "alert" }, error.message), el("p", {}, el("a", { href: "#/" }, "Back to the runs")));
}

// Calls look now and then every few seconds while the view is open and the page is seen.
function poll(look) {
  const mine = visit;
  const again = async () => {
    if (mine !== visit) return;
    try {
      if (!document.hidden) await look(() => mine === visit);
    } catch (error) {
      if (mine === visit) problem(error);
      if (!(error instanceof TypeError)) return;
    }
    if (mine === visit) timer = setTimeout(again, POLL_MS);
  };
  return again();
}

function loading() {
  return el("p.soft.loading", { role: "status" }, "Loading\u2026");
}

function field(label, input, kind = "") {
  return el(`label${kind}`, {}, label, input);
}

function cell(label, value, kind = "") {
  return el(`td${kind}`, { "data-label": label }, value);
}

// --- The list of runs ---------------------------------------------------------------------------

function viewRuns() {
  const chosen = new Set();
  const filter = el("input", { type: "search", placeholder: "name, model or precision", oninput: () => draw() });
  const compare = el("button.chief", { type: "button", disabled: true, onclick: () => { location.hash = address("compare", { run: [...chosen] }); } }, "Compare");
  const body = el("tbody");
  const note = loading();
  const head = ["compare", "run", "state", "model", "precision", "last figure", "evaluations", "started"];
  let found = { runs: [], roots: [], total: 0 };
  show("Runs", [], el("h1", {}, "Runs"), note,
    el("div.controls", {}, field("Find", filter, ".wide"), compare),
    el("div.card", {}, el("table.list", {}, el("thead", {}, el("tr", {}, head.map((one) => el("th", { scope: "col" }, one)))), body)));

  function choose(name, input) {
    if (input.checked) chosen.add(name);
    else chosen.delete(name);
    compare.disabled = chosen.size < 2 || chosen.size > 7;
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
  }

  function row(run) {
    const box = el("input", { type: "checkbox", checked: chosen.has(run.name), "aria-label": `compare ${run.name}` });
    box.addEventListener("change", () => choose(run.name, box));
    return el("tr", {}, cell("compare", box),
      el("td", {}, el("a", { href: address("run", { run: run.name }) }, el("b", {}, run.name))),
      el("td", { "data-label": "state" }, el(run.running ? "span.live" : "span", {}, run.readable ? run.state : "run.json cannot be read"), run.stopped ? el("div.soft", {}, run.stopped) : null),
      cell("model", run.model), cell("precision", run.preset, ".nowrap"),
      cell("last figure", run.value ? `${run.figure} ${run.value}` : "", ".nowrap"),
      cell("evaluations", run.evaluations.map((one) => `${one.label} ${one.value}`).join("; ")),
      cell("started", run.started.replace("T", " ").slice(0, 16)));
  }

  function draw() {
    const wanted = filter.value.toLowerCase();
    const fits = found.runs.filter((run) => `${run.name} ${run.model} ${run.preset}`.toLowerCase().includes(wanted));
    const focused = document.activeElement && document.activeElement.getAttribute("aria-label");
    body.replaceChildren(...fits.map(row));
    if (focused) body.querySelectorAll("input").forEach((one) => { if (one.getAttribute("aria-label") === focused) one.focus(); });
    const cut = found.total > found.runs.length ? `; the latest ${found.runs.length} of ${found.total}` : "";
    note.textContent = visible(`${fits.length} runs in ${found.roots.join(", ")}${cut}`);
    if (!found.total) note.textContent += ": none yet. A run appears here when isobit train writes into the folder.";
  }

  let before = "";
  return poll(async (isCurrent) => {
    const said = await ask("runs");
    if (!isCurrent()) return;
    const running = said.runs.filter((run) => run.running).length;
    say(running ? `${running} running` : "nothing is running", running > 0);
    const text = JSON.stringify(said);
    if (text === before) return;
    before = text;
    found = said;
    draw();
  });
}

// --- Curves -------------------------------------------------------------------------------------

// Puts the server's charts in place; what was folded open stays so, and so does the place on the page.
function place(holder, html) {
  const name = (one) => (one.closest("figure, section") || one).innerText.split("\n")[0] + one.querySelector("summary").textContent.replace(/[\d,]+/g, "");
  const open = new Set([...holder.querySelectorAll("details[open]")].map(name));
  const focused = holder.contains(document.activeElement) ? [...holder.querySelectorAll("summary")].indexOf(document.activeElement) : -1;
  const top = scrollY;
  holder.innerHTML = html;
  for (const one of holder.querySelectorAll("details")) if (open.has(name(one))) one.open = true;
  if (focused >= 0 && holder.querySelectorAll("summary")[focused]) holder.querySelectorAll("summary")[focused].focus();
  scrollTo(0, top);
}

const tip = el("div.tip", { hidden: true });
document.body.append(tip);
document.addEventListener("pointermove", (event) => {
  const hit = event.target instanceof Element ? event.target.closest(".hit") : null;
  tip.hidden = !hit;
  if (!hit) return;
  const table = hit.closest("figure").querySelector("table"), number = [...hit.parentNode.querySelectorAll(".hit")].indexOf(hit);
  const [heads, cells] = [table.tHead.rows[0], table.tBodies[0].rows[number]].map((row) => [...row.cells].map((one) => one.textContent));
  tip.textContent = heads.map((head, at) => `${head} ${cells[at]}`).join("\n");
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  tip.style.setProperty("left", `${Math.max(8, left)}px`);
  tip.style.setProperty("top", `${Math.max(8, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8))}px`);
});
document.addEventListener("pointerdown", () => { tip.hidden = true; });

function tabs(run, here) {
  return el("nav.tabs", { "aria-label": "parts of this run" },
    [["run", "Curves"], ["rewards", "Rewards"], ["completions", "Completions"]].map(([view, text]) => el("a", { href: address(view, { run }), "aria-current": view === here ? "page" : null }, text)));
}

function select(options, value) {
  const input = el("select", {}, options.map(([name, text]) => el("option", { value: name }, text)));
  input.value = value;
  return input;
}

const VIEW = ["from", "to", "axis", "smooth"];
const AXES = [["", "steps"], ["hours", "hours spent"], ["tokens", "tokens trained on"]];
const SMOOTH = [["", "no"], ["5", "5 points"], ["20", "20 points"], ["100", "100 points"], ["500", "500 points"]];

// How the curves are drawn: a range of steps, the x axis and smoothing; go is called with what was chosen.
function viewControls(values, go) {
  const inputs = {
    from: el("input", { type: "number", min: 0, step: 1, value: values.get("from") || "", inputmode: "numeric" }),
    to: el("input", { type: "number", min: 0, step: 1, value: values.get("to") || "", inputmode: "numeric" }),
    axis: select(AXES, values.get("axis") || ""),
    smooth: select(SMOOTH, values.get("smooth") || ""),
  };
  const chosen = () => go(Object.fromEntries(VIEW.map((name) => [name, inputs[name].value])));
  for (const name of ["axis", "smooth"]) inputs[name].addEventListener("change", chosen);
  return el("form.controls", { onsubmit: (event) => { event.preventDefault(); chosen(); } },
    field("From step", inputs.from, ".narrow"), field("to step", inputs.to, ".narrow"), el("button", { type: "submit" }, "Show these steps"),
    el("button", { type: "button", onclick: () => go({}) }, "All steps"), field("X axis", inputs.axis), field("Smoothing", inputs.smooth));
}

function viewOf(values) {
  return Object.fromEntries(VIEW.map((name) => [name, values.get(name)]));
}

function live(name, values, holder) {
  let version = "";
  return poll(async (isCurrent) => {
    const said = await ask(name, { ...values, version });
    if (!isCurrent()) return;
    const steps = said.last === undefined ? status.dataset.steps || "" : `steps ${said.first} to ${said.last}`;
    status.dataset.steps = steps;
    say(`${said.running ? "running" : "not running"}${said.done ? "" : ", still reading"}${steps ? ", " + steps : ""}`, said.running);
    if (said.html !== undefined) place(holder, said.html);
    version = said.version;
  });
}

function viewRun(values) {
  const run = values.get("run");
  const holder = el("div", {}, loading());
  const go = (view) => { location.hash = address("run", { run, ...view }); };
  show(run, [[run]], el("h1", {}, run), tabs(run, "run"), viewControls(values, go), holder);
  return live("run", { run, ...viewOf(values) }, holder);
}

// --- Comparison ---------------------------------------------------------------------------------

function viewCompare(values) {
  const runs = values.getAll("run");
  const how = values.get("how") || "";
  const holder = el("div", {}, loading());
  const kept = { run: runs, how, ...viewOf(values) };
  const go = (view) => { location.hash = address("compare", { run: runs, how, ...view }); };
  const choices = [["", "Overlay"], ["paired", "Paired: difference to the first"], ["seeds", "Mean over seeds"]].map(([value, text]) =>
    el("button", { type: "button", "aria-pressed": String(value === how), onclick: () => { location.hash = address("compare", { ...kept, how: value }); } }, text));
  const others = runs.slice(1).map((other) => el("li", {}, el("a", { href: address("pairs", { run: [runs[0], other] }) }, `${runs[0]} against ${other}`)));
  show(runs.join(" against "), [["comparison"]], el("h1", {}, runs.join(" against ")),
    el("div.controls", { role: "group", "aria-label": "how curves are compared" }, choices), viewControls(values, go),
    el("div", {}, el("b", {}, "Answers to the same prompts, in pairs:"), el("ul.plain", {}, others)), holder);
  return live("compare", kept, holder);
}

async function viewPairs(values) {
  const runs = values.getAll("run");
  const mine = visit;
  let kept = values.get("kept") || "";
  let said;
  do {
    said = await ask("pairs", { run: runs, step: values.get("step"), source: values.get("source"), kept });
    if (mine !== visit) return;
    kept = said.of_kept ? "1" : "0";
    say(said.progress < 1 ? `${Math.floor(100 * said.progress)}% read` : "", false);
  } while (said.progress < 1);
  const key = (one) => `${one.source} step ${one.step}`;
  const select = el("select", { onchange: (event) => { const one = said.common[event.target.selectedIndex]; location.hash = address("pairs", { run: runs, kept, step: one.step, source: one.source }); } },
    said.common.map((one) => el("option", { selected: one.step === said.step && one.source === said.source }, key(one))));
  const source = el("select", { onchange: (event) => { location.hash = address("pairs", { run: runs, kept: event.target.value }); } },
    WHICH.map(([value, text]) => el("option", { value, selected: value === kept }, text)));
  const bounds = said.error === null ? "" : ` (95%: ${signed(said.mean - 1.96 * said.error)} to ${signed(said.mean + 1.96 * said.error)}, normal approximation)`;
  const result = said.count
    ? `${said.count} prompts were answered by both; the mean reward of the second minus that of the first is ${signed(said.mean)}${bounds}.`
    : "No prompt was answered by both in a step that both have written.";
  const head = ["prompt", ...runs, "difference"];
  const answer = (row, side) => el("td", { "data-label": runs[side] }, el("b", {}, number(row.rewards[side])), " ",
    el("a.mono", { href: address("completion", { run: runs[side], kept, place: row.places[side] }) }, row.texts[side] || "(empty)"));
  show("Pairs", [["comparison", address("compare", { run: runs })], ["pairs"]], el("h1", {}, "Answers to the same prompts"),
    el("p.soft", {}, `${runs[0]} is the first run, ${runs[1]} the second. A reward is the mean of the prompt's group at that step; the text is the group's first answer.`),
    el("div.controls", {}, field("Completions", source), field("Set and step", select)), el("p.card", {}, result),
    el("div.card.below", {}, el("table.list", {}, el("thead", {}, el("tr", {}, head.map((one) => el(`th${one === "difference" ? ".num" : ""}`, { scope: "col" }, one)))),
      el("tbody", {}, said.rows.map((row) => el("tr", {}, el("td.mono", { "data-label": "prompt" }, row.prompt), answer(row, 0), answer(row, 1), cell("difference", signed(row.difference), ".num")))))));
}

// --- Completions --------------------------------------------------------------------------------

const WHICH = [["1", "kept (completions/)"], ["0", "samples (completions.jsonl)"]];
const ORDERS = [["", "newest first"], ["oldest", "oldest first"], ["best", "highest reward first"], ["worst", "lowest reward first"], ["longest", "longest first"], ["shortest", "shortest first"]];
const FILTERS = ["source", "from", "to", "prompt", "lowest", "highest", "text", "order", "kept"];

function viewCompletions(values) {
  const run = values.get("run");
  const inputs = {
    source: select([["", "all"], ["train", "training"], ["eval", "evaluations"]], ""),
    order: select(ORDERS, ""),
    kept: select(WHICH, ""),
    text: el("input", { type: "search" }),
    prompt: el("input", { type: "search" }),
  };
  for (const name of ["from", "to", "lowest", "highest"]) inputs[name] = el("input", { type: "number", step: "any" });
  const given = Object.fromEntries(FILTERS.map((name) => [name, values.get(name) || ""]));
  if (!["", "train", "eval"].includes(given.source)) inputs.source.append(el("option", { value: given.source }, given.source));
  for (const name of FILTERS) inputs[name].value = given[name];
  const body = el("tbody");
  const note = el("p.soft", { role: "status" });
  const more = el("button", { type: "button", onclick: () => load() }, "Further completions");
  const fresh = el("button", { type: "button", hidden: true, onclick: () => start() }, "");
  const form = el("form.controls", { onsubmit: (event) => { event.preventDefault(); go(); } },
    field("Text", inputs.text, ".wide"), field("Set", inputs.source), field("Prompt id", inputs.prompt),
    field("From step", inputs.from, ".narrow"), field("to step", inputs.to, ".narrow"),
    field("Reward from", inputs.lowest, ".narrow"), field("to", inputs.highest, ".narrow"),
    field("Order", inputs.order), field("Which", inputs.kept), el("button.chief", { type: "submit" }, "Search"),
    el("button", { type: "button", onclick: () => { location.hash = address("completions", { run }); } }, "Clear"));
  const head = ["step", "set", "prompt", "completion", "reward", "tokens"];
  show(`Completions of ${run}`, [[run, address("run", { run })], ["completions"]], el("h1", {}, run), tabs(run, "completions"), form, note, fresh,
    el("div.card", {}, el("table.list", {}, el("thead", {}, el("tr", {}, head.map((one) => el(`th${one === "reward" || one === "tokens" ? ".num" : ""}`, { scope: "col" }, one)))), body)), el("p", {}, more));
  const mine = visit;
  let next = null, total = 0, shown = 0, before = false;
  let which = given.kept; // without a choice the server's, which then stays

  function go() {
    location.hash = address("completions", { run, ...Object.fromEntries(FILTERS.map((name) => [name, inputs[name].value])) });
  }

  function row(one) {
    const href = address("completion", { run, ...given, kept: which, place: one.place });
    const turns = one.turns === null ? "" : `, ${one.turns} turns`;
    return el("tr", {}, cell("step", number(one.step)), cell("set", one.source === "train" ? "training" : one.source),
      el("td.mono", { "data-label": "prompt" }, el("div.soft", {}, one.prompt_id), one.prompt),
      el("td.mono", { "data-label": "completion" }, el("a", { href }, one.completion || "(empty)")),
      cell("reward", one.reward === null ? "failed" : number(one.reward), ".num"),
      cell("tokens", `${number(one.tokens)}${turns}${one.finish_reason === "stop" ? "" : ", " + one.finish_reason}`, ".num"));
  }

  function tell(said) {
    const filtered = FILTERS.some((name) => given[name] && name !== "order" && name !== "kept");
    const part = said.progress < 1 ? ` ${Math.floor(100 * said.progress)}% of the file is read so far.` : "";
    const kept = said.of_kept || said.kept === null ? "" : said.kept ? ` The run has also kept ${said.kept.toLocaleString("en")} in its folder completions/.` : "";
    const nothing = said.total || said.progress < 1 ? "" : said.of_kept ? " The run keeps none: set tracking.completions in its recipe." : " No completion has been written yet.";
    const text = `${shown.toLocaleString("en")} shown of ${said.total.toLocaleString("en")}${filtered ? " (filtered)" : ""}.${part}${kept}${nothing}`;
    if (note.textContent !== text) note.textContent = text;
    for (const one of said.sources) if (![...inputs.source.options].some((option) => option.value === one)) inputs.source.append(el("option", { value: one }, one));
  }

  // Asks on until a page is filled or the file ends: an answer ends early when it took long.
  async function load() {
    more.disabled = true;
    const full = shown + 50;
    do {
      const said = await ask("completions", { run, ...given, kept: which, after: next });
      if (mine !== visit) return;
      inputs.kept.value = which = said.of_kept ? "1" : "0";
      body.append(...said.rows.map(row));
      shown += said.rows.length;
      next = said.next;
      total = said.total;
      tell(said);
      if (next === null) break;
      if (shown < full) note.textContent += " Searching further.";
    } while (shown < full);
    note.textContent = note.textContent.replace(" Searching further.", "");
    more.disabled = false;
    more.hidden = next === null;
  }

  function start() {
    next = null; shown = 0;
    fresh.hidden = true;
    more.hidden = true;
    note.textContent = "Loading\u2026";
    body.replaceChildren();
    return load();
  }

  // Reads a long file to its end, then searches it once more, as the newest come last.
  async function look(isCurrent) {
    let said, wasLong = false;
    do {
      said = await ask("completions", { run, kept: which, most: 0 });
      if (!isCurrent()) return;
      tell(said);
      say(`${said.running ? "running" : "not running"}${said.progress < 1 ? `, ${Math.floor(100 * said.progress)}% read` : ""}`, said.running);
      wasLong = wasLong || said.progress < 1;
    } while (said.progress < 1);
    if (wasLong && !before) await start();
    before = true;
    fresh.hidden = said.total === total;
    fresh.textContent = said.total > total ? `${(said.total - total).toLocaleString("en")} more were written: search again` : "the file has changed: search again";
  }

  return start().then(() => poll(look));
}

// --- One completion -----------------------------------------------------------------------------

function shadeOf(value) {
  return typeof value === "number" ? `s${SHADES.filter((limit) => value < limit).length}` : "s0";
}

function leanOf(value) {
  if (typeof value !== "number" || value === 0) return "";
  const size = Math.abs(value) < 0.5 ? 1 : Math.abs(value) < 1.5 ? 2 : 3;
  return `${value > 0 ? "a" : "d"}${size}`;
}

// The tokens: one of them is reached by the Tab key, the others by the arrows.
function tokensOf(said, by) {
  const advantage = (place) => (Array.isArray(said.advantages) ? said.advantages[place] : said.advantage);
  const holder = el("div.tokens.mono", { role: "group", "aria-label": "tokens" });
  holder.append(...said.token_texts.map((text, place) => {
    const prob = said.log_probs[place];
    const value = advantage(place);
    const words = `${typeof prob === "number" ? prob.toFixed(4).replace("-", "−") : "no"} nats${typeof value === "number" ? `, advantage ${signed(value)}` : ""}`;
    const kind = by === "advantage" ? leanOf(value) : shadeOf(prob);
    return el(`span.t${kind ? "." + kind : ""}`, { tabindex: place ? -1 : 0, "data-p": words, "aria-label": `${visible(text)}: ${words}` }, String(text).replace(/\n/g, "↵\n"));
  }));
  holder.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const other = step && event.target[step > 0 ? "nextElementSibling" : "previousElementSibling"];
    if (!other) return;
    event.target.tabIndex = -1;
    other.tabIndex = 0;
    other.focus();
    event.preventDefault();
  });
  return holder;
}

function legend(by) {
  const entry = (kind, text) => el("li", {}, el(`span.t${kind ? "." + kind : ""}`, {}, text));
  const entries = by === "advantage"
    ? [["d3", "below −1.5"], ["d2", "to −0.5"], ["d1", "to 0"], ["", "0 or none"], ["a1", "to 0.5"], ["a2", "to 1.5"], ["a3", "1.5 or more"]]
    : [["s0", "−0.1 nats or more"], ...SHADES.map((limit, place) => [`s${place + 1}`, `below ${number(limit)}`])];
  return el("ul.shades", { "aria-label": "shades" }, entries.map(([kind, text]) => entry(kind, text)));
}

const MARKED = /(<tool_call>[\s\S]*?(?:<\/tool_call>|$)|\[TOOL_CALLS\][^\n]*)/;
const BARE = /(^\s*\{[\s\S]*\}\s*$|\[\w+\([^\n]*\)\])/;

// A turn's text, with calls of tools in blocks of their own: between tags, or without where a tool has answered.
function turnText(text, isAnswered) {
  const form = isAnswered && !MARKED.test(text) ? BARE : MARKED;
  return String(text).split(form).map((part, place) => (place % 2 ? el("span.call", {}, part) : part));
}

function turnsOf(messages, rewards) {
  let count = 0;
  return messages.filter((one) => one && typeof one === "object").map((one, place, all) => {
    const isModel = one.role === "assistant";
    if (isModel) count += 1;
    const reward = isModel && Array.isArray(rewards) ? `, reward ${number(rewards[count - 1])}` : "";
    const title = isModel ? `turn ${count}, the model${reward}` : one.role === "tool" ? "answer of a tool" : one.role;
    const calls = Array.isArray(one.tool_calls) ? one.tool_calls.map((call) => el("span.call", {}, JSON.stringify(call))) : [];
    return el(`div.turn.${isModel ? "assistant" : "tool"}`, {}, el("b", {}, title), el("div.text.mono", { tabindex: 0, role: "group", "aria-label": title }, turnText(one.content, isModel && all[place + 1]?.role === "tool"), calls));
  });
}

// Links to what is before and behind, also by the keys p and n.
function neighbours(view, name, said, values, ...others) {
  const links = [["previous", "p"], ["next", "n"]].map(([where, key]) => (said[where] === null
    ? el("span.soft", {}, `no ${where}`)
    : el("a", { href: address(view, { ...values, [name]: said[where] }), "data-key": key, "aria-keyshortcuts": key }, `${where} (${key})`)));
  return el("nav.neighbours", { "aria-label": "neighbours" }, links, others);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, select, textarea")) return;
  const link = content.querySelector(`a[data-key="${CSS.escape(event.key)}"]`);
  if (link) location.hash = link.getAttribute("href");
});

// --- The rewards of a step ----------------------------------------------------------------------

async function viewRewards(values) {
  const run = values.get("run"), mine = visit;
  let said;
  do {
    said = await ask("rewards", { run, kept: values.get("kept"), source: values.get("source"), step: values.get("step") });
    if (mine !== visit) return;
    say(said.progress < 1 ? `${Math.floor(100 * said.progress)}% read` : "", said.running);
  } while (said.progress < 1);
  const kept = said.of_kept ? "1" : "0";
  const inputs = {
    source: select(said.sources.map((name) => [name, name === "train" ? "training" : name]), said.source),
    step: el("input", { type: "number", step: 1, value: said.step ?? "", inputmode: "numeric" }),
    kept: select(WHICH, kept),
  };
  const go = (event) => {
    event.preventDefault();
    location.hash = address("rewards", { run, source: inputs.source.value, step: inputs.step.value, kept: inputs.kept.value });
  };
  const form = el("form.controls", { onsubmit: go, onchange: go }, field("Set", inputs.source), field("Step", inputs.step, ".narrow"), field("Which", inputs.kept), el("button", { type: "submit" }, "Show"));
  const holder = el("div.one");
  const listed = { run, kept, source: said.source, from: said.step, to: said.step };
  const what = said.of_kept ? "Of all completions that the run has kept of this step." : "Of the groups of which completions.jsonl has samples.";
  show(`Rewards of ${run}`, [[run, address("run", { run })], ["rewards"]], el("h1", {}, run), tabs(run, "rewards"), form,
    neighbours("rewards", "step", said, { run, kept, source: said.source }, said.step === null ? null : el("a", { href: address("completions", listed) }, "completions of this step")),
    holder, el("p.soft", {}, said.html ? what : "No completion of this step has a reward."));
  place(holder, said.html);
}

async function viewCompletion(values) {
  const run = values.get("run"), kept = values.get("kept") || "", mine = visit;
  const filters = Object.fromEntries(FILTERS.map((name) => [name, values.get(name)]));
  const said = await ask("completion", { run, ...filters, place: values.get("place") });
  if (mine !== visit) return;
  const parts = Object.entries(said.reward_parts || {});
  const valid = (said.group_rewards || []).filter((one) => typeof one === "number");
  const mean = valid.length ? valid.reduce((sum, one) => sum + one, 0) / valid.length : null;
  const probs = (said.log_probs || []).filter((one) => typeof one === "number");
  const facts = [["step", number(said.step)], ["set", said.source], ["prompt id", said.prompt_id], ["reward", said.reward === null ? "failed" : number(said.reward)],
    ...parts.map(([name, value]) => [`reward part ${name}`, value !== null ? number(value) : said.reward === null ? "failed" : "does not apply"]),
    ["mean of its group", mean === null ? null : `${number(mean)} (${said.group_rewards.length} completions)`],
    ["advantage", typeof said.advantage === "number" ? signed(said.advantage) : said.advantage === null && said.source === "train" ? "none: not learnt from" : null],
    ["ended by", said.finish_reason], ["tokens", number(said.tokens)],
    ["mean log-probability", probs.length ? `${number(probs.reduce((sum, one) => sum + one, 0) / probs.length)} nats` : null], ["the dataset's answer", said.answer]]
    .filter(([, value]) => value !== null && value !== undefined);
  const holder = el("div");
  const draw = (by) => {
    holder.replaceChildren(legend(by), tokensOf(said, by));
    for (const one of choices) one.setAttribute("aria-pressed", String(one.dataset.by === by));
  };
  const hasTokens = Array.isArray(said.token_texts) && Array.isArray(said.log_probs);
  const hasAdvantage = typeof said.advantage === "number" || Array.isArray(said.advantages);
  const choices = [["log-probability", true], ["advantage", hasAdvantage]].map(([by, there]) => el("button", { type: "button", "data-by": by, disabled: !there, onclick: () => draw(by) }, `by ${by}`));
  const beside = said.group.length > 1 ? [el("h2", {}, "The same prompt in this step"), el("ul.group", {}, said.group.map((one) =>
    el("li", {}, el("a", { href: address("completion", { run, ...filters, place: one.place }), "aria-current": one.place === said.place ? "true" : null }, one.reward === null ? "failed" : `reward ${number(one.reward)}`))))] : [];
  const missing = said.missing.length ? [el("div.card.below", { role: "note" }, el("b", {}, "Not recorded"), el("ul.plain", {}, said.missing.map((one) => el("li", {}, one))))] : [];
  show(`Completion of ${run}`, [[run, address("run", { run })], ["completions", address("completions", { run, ...filters })], [`${said.source} step ${said.step}`]],
    el("h1", {}, `${said.prompt_id}, step ${number(said.step)}`),
    neighbours("completion", "place", said, { run, ...filters }, el("a", { href: address("rewards", { run, kept, source: said.source, step: said.step }) }, "rewards of this step")),
    el("dl.card.facts", {}, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))), ...beside,
    el("h2", {}, "Prompt"), el("div.card.text.mono", { tabindex: 0, role: "group", "aria-label": "prompt" }, said.prompt ?? ""),
    ...(Array.isArray(said.messages) ? [el("h2", {}, "Turns"), el("div.card", {}, turnsOf(said.messages, said.turn_rewards))] : [el("h2", {}, "Completion"), el("div.card.text.mono", { tabindex: 0, role: "group", "aria-label": "completion" }, said.completion ?? "")]),
    ...(hasTokens ? [el("h2", {}, "Tokens"), el("div.card", {}, el("div.controls", { role: "group", "aria-label": "shade tokens" }, choices), holder)] : []), ...missing);
  if (hasTokens) draw("log-probability");
}

// --- Which view ---------------------------------------------------------------------------------

const VIEWS = { "": viewRuns, run: viewRun, compare: viewCompare, pairs: viewPairs, rewards: viewRewards, completions: viewCompletions, completion: viewCompletion };

async function route() {
  if (location.hash && !location.hash.startsWith("#/")) return; // a place on the page
  clearTimeout(timer);
  visit += 1;
  const mine = visit;
  delete status.dataset.steps;
  say("", false);
  content.replaceChildren(loading());
  const [name, query] = location.hash.slice(2).split(/\?(.*)/s);
  try {
    await (VIEWS[name] || viewRuns)(new URLSearchParams(query || ""));
  } catch (error) {
    if (mine === visit) problem(error);
  }
}

window.addEventListener("hashchange", () => { scrollTo(0, 0); route().then(() => content.focus({ preventScroll: true })); });
route();
